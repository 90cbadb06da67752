"""The program IR and how it travels; shared by client and runtime."""
