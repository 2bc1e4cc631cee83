//! Pure: cluster state and plans → bodies of objects, for the API server and for the disk.
//!
//! Builders of bodies live here. Which object is due is decided in [`decide`](crate::decide), and the requests are sent
//! by [`shell`](crate::shell).

pub mod children;
pub mod crds;
pub mod desired;
pub mod render;
