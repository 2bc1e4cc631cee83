//! Pure: HTTP/1.1 message boundaries, the same code in the kernel and in unit tests.
