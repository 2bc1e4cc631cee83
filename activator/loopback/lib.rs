//! Package of the tests of activators on loopback, which are in `activator/tests/loopback`.
//!
//! The package of the activator is optimised in builds of tests, because some of its tests send hundreds of thousands of
//! requests. These tests send few, and optimising them took two minutes of each build.
