//! Client of container registries, for the controller's digests and the local node's images.
//!
//! | module | | content |
//! |---|---|---|
//! | [`image_reference`] | pure | parsing of image names, and registries that may be asked in plain HTTP |
//! | [`credential_rules`] | pure | differences between pull secrets and the files of `docker login` |
//! | [`credentials`] | pure | pull secrets and login files → logins at registries |
//! | [`request_error`] | pure | kinds of failed requests |
//! | [`session`] | shell | digest, manifest and layers of one image, with one login |
//! | [`client`] | shell | the digest of a tag, with all logins that fit |
//!
//! Storage of images, advice for users and the choice between HTTPS and plain HTTP differ between the callers, and are
//! parameters or code of theirs.
#![forbid(unsafe_code)]

pub mod client;
pub mod credential_rules;
pub mod credentials;
pub mod image_reference;
pub mod request_error;
pub mod session;

pub use client::RegistryClient;
pub use credentials::{Keyring, PullSecret, RegistryLogin};
pub use image_reference::{ImageReference, ImageTag};
pub use oci_client::{ParseError, Reference, client::ClientProtocol, errors::OciDistributionError};
pub use session::{RegistrySession, SessionOptions};
