//! Pure: Knative's `config-*` ConfigMaps, parsed, checked and followed live.
//!
//! Each file below holds one ConfigMap: its keys, defaults, bounds and messages. [`read`] turns the data of one into
//! its struct with what to warn of, or into everything that is wrong with it. [`Configs`] holds all of them as they
//! are in force: a value that cannot be used never replaces one that can.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use crate::{
    parse::{Problem, line},
    policy::AutoscalerConfig,
};

mod autoscaler;
pub mod certmanager;
pub mod defaults;
pub mod deployment;
pub mod domain;
pub mod example;
pub mod features;
pub mod gc;
pub mod go;
pub mod keys;
pub mod leader_election;
pub mod logging;
pub mod network;
pub mod observability;
pub mod template;

pub use certmanager::CertManager;
pub use defaults::Defaults;
pub use deployment::Deployment;
pub use domain::Domain;
pub use features::{Features, Flag, SecureDefaults};
pub use gc::Gc;
pub use keys::{Keys, read};
pub use leader_election::LeaderElection;
pub use logging::Logging;
pub use network::Network;
pub use observability::Observability;

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

/// What to report as an event on a ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Whether it is a Kubernetes `Warning`.
    pub is_warning: bool,
    /// One word: `ConfigRefused`, `ConfigAccepted`, `ConfigHint`, `ConfigDeleted`.
    pub reason: &'static str,
    /// One line.
    pub message: String,
}

impl Event {
    fn new(is_warning: bool, reason: &'static str, message: String) -> Self {
        Self { is_warning, reason, message }
    }
}

/// What an update led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Whether a setting in force is another one now, so that everything must be planned again.
    pub is_changed: bool,
    /// What to report on the ConfigMap.
    pub events: Vec<Event>,
}

/// Declares the ConfigMaps once: field and type.
macro_rules! configs {
    ($($(#[$doc:meta])* $field:ident: $type:ty;)*) => {
        /// All settings in force. Cheap to clone: readers keep the `Arc`s they need.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Configs {
            $($(#[$doc])* pub $field: Arc<$type>,)*
            seen: BTreeMap<&'static str, Seen>,
        }

        /// Names of the ConfigMaps that are read.
        pub const NAMES: &[&str] = &[$(<$type>::NAME,)*];

        impl Configs {
            /// Takes the data of one ConfigMap, or that it is gone. Others than [`NAMES`] change nothing.
            pub fn update(&mut self, name: &str, data: Option<&BTreeMap<String, String>>) -> Update {
                match name {
                    $(<$type>::NAME => follow(&mut self.$field, &mut self.seen, data),)*
                    _ => Update::default(),
                }
            }
        }

        /// Keys of a ConfigMap that are asked about, whatever it holds.
        #[cfg(test)]
        pub(crate) fn known(name: &str) -> std::collections::BTreeSet<String> {
            match name {
                $(<$type>::NAME => keys::known::<$type>(),)*
                other => panic!("no ConfigMap of ours: {other}"),
            }
        }

        /// What admission says of a ConfigMap: warnings, or why it is refused. Others than [`NAMES`] are fine.
        pub fn admit(
            name: &str,
            annotations: &BTreeMap<String, String>,
            data: &BTreeMap<String, String>,
        ) -> Result<Vec<String>, Vec<Problem>> {
            if !NAMES.contains(&name) {
                return Ok(Vec::new());
            }
            example::check(annotations, data).map_err(|why| vec![Problem::new("", why)])?;
            match name {
                $(<$type>::NAME => read::<$type>(data).map(|read| read.warnings),)*
                _ => Ok(Vec::new()),
            }
        }
    };
}

configs! {
    /// `config-autoscaler`.
    autoscaler: AutoscalerConfig;
    /// `config-certmanager`.
    certmanager: CertManager;
    /// `config-defaults`.
    defaults: Defaults;
    /// `config-deployment`.
    deployment: Deployment;
    /// `config-domain`.
    domain: Domain;
    /// `config-features`.
    features: Features;
    /// `config-gc`.
    gc: Gc;
    /// `config-leader-election`.
    leader_election: LeaderElection;
    /// `config-logging`.
    logging: Logging;
    /// `config-network`.
    network: Network;
    /// `config-observability`.
    observability: Observability;
    /// `config-tracing`, which sets nothing any more.
    tracing: observability::OldTracing;
}

impl Configs {
    /// Takes a ConfigMap as the API server holds it, or that it is gone.
    pub fn observe(&mut self, name: &str, object: Option<&serde_json::Value>) -> Update {
        // Without any key there is no `data` at all.
        let data = object.map(|it| {
            let pairs = it["data"].as_object().into_iter().flatten();
            let text = |(key, text): (&String, &serde_json::Value)| {
                Some((key.clone(), text.as_str()?.to_owned()))
            };
            pairs.filter_map(text).collect::<BTreeMap<String, String>>()
        });
        self.update(name, data.as_ref())
    }

    /// ConfigMaps whose last data could not be used, each with the reason.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.seen.iter().filter_map(|(name, seen)| Some((*name, seen.refused.as_deref()?)))
    }
}

/// The last data of one ConfigMap.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    /// Tells equal data, so that a watch that begins again reports nothing twice.
    hash: u64,
    /// Why it could not be used.
    refused: Option<String>,
}

fn follow<T: ConfigMap + PartialEq + fmt::Debug>(
    have: &mut Arc<T>,
    seen: &mut BTreeMap<&'static str, Seen>,
    data: Option<&BTreeMap<String, String>>,
) -> Update {
    let Some(data) = data else {
        let known = seen.remove(T::NAME).is_some();
        let message = format!("{} is gone: its defaults hold", T::NAME);
        let gone = known.then(|| Event::new(false, "ConfigDeleted", message));
        let is_changed = replace(have, T::default());
        return Update { is_changed, events: gone.into_iter().collect() };
    };
    let mut hasher = DefaultHasher::new();
    data.hash(&mut hasher);
    let hash = hasher.finish();
    let was_refused = match seen.entry(T::NAME) {
        Entry::Occupied(seen) if seen.get().hash == hash => return Update::default(),
        Entry::Occupied(seen) => seen.get().refused.is_some(),
        Entry::Vacant(_) => false,
    };
    match read::<T>(data) {
        Err(problems) => {
            let why = line(&problems);
            let message = format!("{}: {why}. The settings before it hold", T::NAME);
            seen.insert(T::NAME, Seen { hash, refused: Some(why) });
            let event = Event::new(true, "ConfigRefused", message);
            Update { is_changed: false, events: vec![event] }
        }
        Ok(Read { value, warnings }) => {
            seen.insert(T::NAME, Seen { hash, refused: None });
            let hint = |it| Event::new(true, "ConfigHint", format!("{}: {it}", T::NAME));
            let again = || Event::new(false, "ConfigAccepted", format!("{} is in force", T::NAME));
            let events = was_refused.then(again).into_iter();
            let events = events.chain(warnings.into_iter().map(hint)).collect();
            Update { is_changed: replace(have, value), events }
        }
    }
}

/// Puts `value` in force; whether it is another one.
fn replace<T: PartialEq>(have: &mut Arc<T>, value: T) -> bool {
    let is_changed = **have != value;
    if is_changed {
        *have = Arc::new(value);
    }
    is_changed
}

#[cfg(test)]
mod tests;
