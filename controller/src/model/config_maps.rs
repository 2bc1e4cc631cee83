//! Pure: Knative's `config-*` ConfigMaps, parsed, checked and followed live.
//!
//! Each module below holds one ConfigMap: its keys, defaults, bounds and messages. [`read`] turns the data of one into
//! its settings with warnings, or into everything that is wrong with it. [`Configs`] holds all of them as they are in
//! force: an invalid value never replaces a valid one.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use crate::model::{
    problem::{Problem, problems_line},
    scale_policy::ScalePolicyConfig,
};

mod autoscaler;
pub mod certmanager;
pub mod defaults;
pub mod deployment;
pub mod domain;
pub mod example;
pub mod features;
pub mod gc;
pub mod go_template;
pub mod keys;
pub mod leader_election;
pub mod logging;
pub mod network;
pub mod observability;
pub mod port_ranges;

pub use certmanager::CertManagerConfig;
pub use defaults::RevisionDefaults;
pub use deployment::DeploymentConfig;
pub use domain::DomainConfig;
pub use features::{Features, Flag, SecureDefaults};
pub use gc::GcConfig;
pub use keys::{ConfigMapReader, read};
pub use leader_election::LeaderElectionConfig;
pub use logging::LoggingConfig;
pub use network::NetworkConfig;
pub use observability::ObservabilityConfig;

/// Settings of one ConfigMap, as a type.
pub trait ConfigMapSettings: Default {
    /// Name of the ConfigMap in the system namespace.
    const NAME: &'static str;

    /// Reads the settings from `keys`. Errors are added to `keys`; if there are any, the returned value is dropped.
    fn read(keys: &mut ConfigMapReader<'_>) -> Self;
}

/// A ConfigMap that could be read.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedConfigMap<T> {
    /// The settings that it holds.
    pub value: T,
    /// Warnings on accepted keys: those of older releases, and unknown ones.
    pub warnings: Vec<String>,
}

/// An event to report on a ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMapEvent {
    /// True for Kubernetes' event type `Warning`, false for `Normal`.
    pub is_warning: bool,
    /// Reason of the event: `ConfigRefused`, `ConfigAccepted`, `ConfigHint` or `ConfigDeleted`.
    pub reason: &'static str,
    /// Text of the event, one line.
    pub message: String,
}

impl ConfigMapEvent {
    fn normal(reason: &'static str, message: String) -> Self {
        Self { is_warning: false, reason, message }
    }

    fn warning(reason: &'static str, message: String) -> Self {
        Self { is_warning: true, reason, message }
    }
}

/// Consequences of an update of one ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigMapUpdate {
    /// True if a setting in force has changed, so that everything must be planned again.
    pub is_changed: bool,
    /// True if the data differ from the latest ones, of which the events were returned before.
    pub has_new_data: bool,
    /// Events to report on the ConfigMap.
    pub events: Vec<ConfigMapEvent>,
}

/// Declares the ConfigMaps once: field and type of each.
macro_rules! configs {
    ($($(#[$doc:meta])* $field:ident: $type:ty;)*) => {
        /// All settings in force. Cheap to clone: readers keep the `Arc`s they need.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Configs {
            $($(#[$doc])* pub $field: Arc<$type>,)*
            seen: BTreeMap<&'static str, LatestConfigMap>,
        }

        /// Names of the ConfigMaps that are read.
        pub const NAMES: &[&str] = &[$(<$type>::NAME,)*];

        impl Configs {
            /// Applies the data of one ConfigMap, or its deletion. Names outside [`NAMES`] change nothing.
            pub fn update(&mut self, name: &str, data: Option<&BTreeMap<String, String>>) -> ConfigMapUpdate {
                match name {
                    $(<$type>::NAME => apply_data(&mut self.$field, &mut self.seen, data),)*
                    _ => ConfigMapUpdate::default(),
                }
            }
        }

        /// Keys that the settings of a ConfigMap read, whatever it holds.
        #[cfg(test)]
        pub fn known(name: &str) -> std::collections::BTreeSet<String> {
            match name {
                $(<$type>::NAME => keys::known::<$type>(),)*
                other => panic!("no ConfigMap of ours: {other}"),
            }
        }

        /// Reviews a ConfigMap for admission: warnings, or the reasons to refuse it. Names outside [`NAMES`] are
        /// accepted.
        pub fn admit(
            name: &str,
            annotations: &BTreeMap<String, String>,
            data: &BTreeMap<String, String>,
        ) -> Result<Vec<String>, Vec<Problem>> {
            if !NAMES.contains(&name) {
                return Ok(Vec::new());
            }
            // The examples come first: an edit of them shows that the operator expects an effect that it will not have.
            example::check(annotations, data).map_err(|error| vec![Problem::new("", error)])?;
            match name {
                $(<$type>::NAME => read::<$type>(data).map(|read| read.warnings),)*
                _ => Ok(Vec::new()),
            }
        }
    };
}

configs! {
    /// Settings of `config-autoscaler`: scaling.
    autoscaler: ScalePolicyConfig;
    /// Settings of `config-certmanager`: issuer of requested certificates.
    certmanager: CertManagerConfig;
    /// Settings of `config-defaults`: defaults of Revisions.
    defaults: RevisionDefaults;
    /// Settings of `config-deployment`: pods and digests.
    deployment: DeploymentConfig;
    /// Settings of `config-domain`: domains of Routes.
    domain: DomainConfig;
    /// Settings of `config-features`: permitted fields of pods.
    features: Features;
    /// Settings of `config-gc`: retention of Revisions.
    gc: GcConfig;
    /// Settings of `config-leader-election`: timing of the lease.
    leader_election: LeaderElectionConfig;
    /// Settings of `config-logging`: log levels.
    logging: LoggingConfig;
    /// Settings of `config-network`: names, rollouts, gateways.
    network: NetworkConfig;
    /// Settings of `config-observability`: request logs, log URLs.
    observability: ObservabilityConfig;
    /// Settings of `config-tracing`, which have no effect any more.
    tracing: observability::TracingConfig;
}

impl Configs {
    /// Applies a ConfigMap as the API server holds it, or its deletion.
    pub fn observe(&mut self, name: &str, object: Option<&serde_json::Value>) -> ConfigMapUpdate {
        // A ConfigMap without keys has no `data` field at all.
        let data = object.map(|object| {
            let pairs = object["data"].as_object().into_iter().flatten();
            let text = |(key, text): (&String, &serde_json::Value)| {
                Some((key.clone(), text.as_str()?.to_owned()))
            };
            pairs.filter_map(text).collect::<BTreeMap<String, String>>()
        });
        self.update(name, data.as_ref())
    }

    /// ConfigMaps whose latest data were refused, each with the reason.
    pub fn refused_config_maps(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.seen.iter().filter_map(|(name, state)| Some((*name, state.refusal.as_deref()?)))
    }
}

/// Record of the latest data of one ConfigMap.
#[derive(Clone, Debug, PartialEq)]
struct LatestConfigMap {
    /// Hash of the data, so that a watch that begins again reports nothing twice.
    data_hash: u64,
    /// Reason for which the data were refused; none if they are in force.
    refusal: Option<String>,
}

/// Applies the data of one ConfigMap to its settings `current`: the common part of every [`Configs::update`].
fn apply_data<T: ConfigMapSettings + PartialEq + fmt::Debug>(
    current: &mut Arc<T>,
    seen: &mut BTreeMap<&'static str, LatestConfigMap>,
    data: Option<&BTreeMap<String, String>>,
) -> ConfigMapUpdate {
    let Some(data) = data else {
        // A ConfigMap that never existed is no event.
        let is_known = seen.remove(T::NAME).is_some();
        let message = format!("{} is gone: its defaults hold", T::NAME);
        let deleted = is_known.then(|| ConfigMapEvent::normal("ConfigDeleted", message));
        let is_changed = replace_if_changed(current, T::default());
        let events = deleted.into_iter().collect();
        return ConfigMapUpdate { is_changed, has_new_data: is_known, events };
    };
    let mut hasher = DefaultHasher::new();
    data.hash(&mut hasher);
    let hash = hasher.finish();
    // Equal data were reported already, also if they were refused.
    let was_refused = match seen.entry(T::NAME) {
        Entry::Occupied(seen) if seen.get().data_hash == hash => return ConfigMapUpdate::default(),
        Entry::Occupied(seen) => seen.get().refusal.is_some(),
        Entry::Vacant(_) => false,
    };
    match read::<T>(data) {
        Err(problems) => {
            // `current` stays as it is: the last valid settings remain in force.
            let problem_line = problems_line(&problems);
            let message = format!("{}: {problem_line}. The settings before it hold", T::NAME);
            seen.insert(T::NAME, LatestConfigMap { data_hash: hash, refusal: Some(problem_line) });
            let event = ConfigMapEvent::warning("ConfigRefused", message);
            ConfigMapUpdate { is_changed: false, has_new_data: true, events: vec![event] }
        }
        Ok(ParsedConfigMap { value, warnings }) => {
            seen.insert(T::NAME, LatestConfigMap { data_hash: hash, refusal: None });
            let hint = |it| ConfigMapEvent::warning("ConfigHint", format!("{}: {it}", T::NAME));
            let accepted =
                || ConfigMapEvent::normal("ConfigAccepted", format!("{} is in force", T::NAME));
            let events = was_refused.then(accepted).into_iter();
            let events = events.chain(warnings.into_iter().map(hint)).collect();
            let is_changed = replace_if_changed(current, value);
            ConfigMapUpdate { is_changed, has_new_data: true, events }
        }
    }
}

/// Puts `value` in force; returns true if it differs from the one before.
fn replace_if_changed<T: PartialEq>(current: &mut Arc<T>, value: T) -> bool {
    let is_changed = **current != value;
    if is_changed {
        *current = Arc::new(value);
    }
    is_changed
}

#[cfg(test)]
mod tests;
