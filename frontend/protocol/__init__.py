"""The program IR and its wire format; shared by client and runtime."""
