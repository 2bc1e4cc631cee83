//! Pure: tags → digests, in the background (knative/serving `pkg/reconciler/revision/{background,resolve}.go` at 98e5ef9).
//!
//! A Revision's images are fixed when it is made: whatever its tags lead to then is what all its pods run.
//!
//! | module | what |
//! |---|---|
//! | [`queue`] | which image is asked for next, for whom, and what came out |
//! | [`reference`](mod@reference) | what an image name means |
//! | [`credentials`] | pull secrets → who to be at a registry |
//! | [`registry`] | one image asked for |
//! | [`resolver`] | the task that keeps asking |

pub mod credentials;
pub mod queue;
pub mod reference;
pub mod registry;
pub mod resolver;

pub use credentials::{Keyring, PullSecret};
pub use queue::{Account, Answer, Wanted};
pub use registry::Registries;
pub use resolver::{PullSecrets, Resolver};
