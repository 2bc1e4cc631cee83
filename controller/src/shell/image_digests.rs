//! Pure: resolution of tags to digests, in the background (knative/serving
//! `pkg/reconciler/revision/{background,resolve}.go` at 98e5ef9).
//!
//! A Revision's images are fixed when it is created: all its pods run the digest that its tag has then.
//!
//! | module | content |
//! |---|---|
//! | [`queue`] | the order of queries, the Revisions that wait, the results |
//! | [`image_reference`] | parsing of image names |
//! | [`pull_credentials`] | pull secrets → logins at registries |
//! | [`registry`] | one query at a registry |
//! | [`resolver`] | the task that sends the queries |

pub mod image_reference;
pub mod pull_credentials;
pub mod queue;
pub mod registry;
pub mod resolver;

pub use pull_credentials::{Keyring, PullSecret};
pub use queue::DigestStatus;
pub use registry::RegistryClient;
pub use resolver::{DigestResolver, PullSecretSource};
