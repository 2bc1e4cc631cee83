//! Pure: objects as users, the API server and the disk hold them → facts of the [model](crate::model).
//!
//! A reader returns facts, or what is wrong with an object. What follows from the facts belongs to
//! [`decide`](crate::decide).

pub mod fields;
pub mod observe;
pub mod parse;
pub mod restore;
