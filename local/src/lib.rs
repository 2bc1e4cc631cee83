//! The tiny node: images, pods, network, names.

pub mod dns;
