//! Pure: objects as users, the API server and the disk hold them → types of the [model](crate::model).
//!
//! A reader returns the parsed object, or what is wrong with it. Decisions that follow from it belong to
//! [`decide`](crate::decide).

pub mod fields;
pub mod observe;
pub mod parse;
pub mod restore;
