"""Text as it comes: of the whole program, of one variable, and in async code."""

import asyncio

import stemma as sgl


@sgl.function
def introduce(s, name, city):
    s += sgl.system("You are a friendly assistant.")
    s += sgl.user(f"Hi, my name is {name}. I live in {city}.")
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=48, temperature=0))
    s += sgl.user("What do you know about me?")
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=48, temperature=0))


async def stream_async(name, city):
    state = introduce.run(name, city, stream=True)
    pieces = []
    async for piece in state.text_async_iter(var_name="answer_2"):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return pieces


def main():
    state = introduce.run(name="Ada", city="Lisbon", stream=True)
    for piece in state.text_iter():
        print(piece, end="", flush=True)
    print()

    state = introduce.run(name="Omar", city="Oslo", stream=True)
    for piece in state.text_iter("answer_1"):
        print(piece, end="", flush=True)
    print()

    asyncio.run(stream_async("Nora", "Bergen"))


if __name__ == "__main__":
    main()
