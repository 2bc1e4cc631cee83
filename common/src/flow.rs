//! Pure: packet and choice arithmetic that runs in the kernel and in unit tests.
