//! Pure: Knative's `config-*` ConfigMaps, parsed and checked into structs.
//!
//! Each file holds one ConfigMap: its keys, defaults, bounds and messages. [`read`] turns the data of one into its
//! struct with what to warn of, or into everything that is wrong with it.

pub mod defaults;
pub mod features;
pub mod go;
pub mod keys;
pub mod template;

pub use defaults::Defaults;
pub use features::{Features, Flag, SecureDefaults};
pub use keys::{Keys, read};

/// The settings of one ConfigMap.
pub trait ConfigMap: Default {
    /// Name of the ConfigMap.
    const NAME: &'static str;

    /// Takes what the keys say; what is wrong is told to `keys`, and then the value is dropped.
    fn read(keys: &mut Keys<'_>) -> Self;
}

/// What a ConfigMap says.
#[derive(Clone, Debug, PartialEq)]
pub struct Read<T> {
    /// Its settings.
    pub value: T,
    /// What is accepted but should be known: keys of older releases, keys that nobody reads.
    pub warnings: Vec<String>,
}
