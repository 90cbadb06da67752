// The flat trie of a vocabulary. Layouts and the way of building are those of
// constrained/token_trie.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

struct Text {
    const uint8_t* data;
    int64_t size;
};

int64_t shared_prefix(const Text& a, const Text& b) {
    const int64_t most = std::min(a.size, b.size);
    return std::mismatch(a.data, a.data + most, b.data).first - a.data;
}

}  // namespace

// `order` [num_texts] becomes the texts' order by bytes, equal ones as they came. The arrays of
// nodes have room for one node a byte and the root; `first` for one more. Returns how many nodes
// there are.
extern "C" int64_t stemma_build_trie(
    const uint8_t* data, const int64_t* offsets, int64_t num_texts, int32_t* order, uint8_t* byte,
    int32_t* depth, int32_t* end, int32_t* first) {
    const auto text = [&](int32_t i) {
        return Text{data + offsets[i], offsets[i + 1] - offsets[i]};
    };
    std::iota(order, order + num_texts, 0);
    std::stable_sort(order, order + num_texts, [&](int32_t i, int32_t j) {
        const Text a = text(i), b = text(j);
        const int compared = std::memcmp(a.data, b.data, std::min(a.size, b.size));
        return compared ? compared < 0 : a.size < b.size;
    });
    std::vector<int32_t> path{0};  // the nodes from the root to the last text's end
    byte[0] = 0;
    depth[0] = first[0] = 0;
    int32_t num_nodes = 1;
    Text last{data, 0};
    for (int64_t i = 0; i < num_texts; i++) {
        const Text next = text(order[i]);
        const int64_t shared = shared_prefix(last, next);
        for (; static_cast<int64_t>(path.size()) > shared + 1; path.pop_back())
            end[path.back()] = num_nodes;
        for (int64_t at = shared; at < next.size; at++) {
            byte[num_nodes] = next.data[at];
            depth[num_nodes] = static_cast<int32_t>(at + 1);
            first[num_nodes] = static_cast<int32_t>(i);
            path.push_back(num_nodes++);
        }
        last = next;
    }
    for (const int32_t open : path) end[open] = num_nodes;
    first[num_nodes] = static_cast<int32_t>(num_texts);
    return num_nodes;
}
