//! Pure: resolution of tags to digests, in the background (knative/serving
//! `pkg/reconciler/revision/{background,resolve}.go` at 98e5ef9).
//!
//! A Revision's images are fixed when it is created: all its pods run the digest that its tag has then.
//!
//! | module | content |
//! |---|---|
//! | [`queue`] | the order of queries, the Revisions that wait, the results |
//! | [`resolver`] | the task that sends the queries |
//!
//! Image names, pull secrets and the queries themselves are in the crate [`registry`].

pub mod queue;
pub mod resolver;

pub use queue::DigestStatus;
pub use resolver::{DigestResolver, PullSecretSource};
