//! Pure: reading of one ConfigMap's keys by name, with errors, and warnings for keys without effect.
//!
//! Messages are those of knative/pkg `configmap/parser` at 521cb33. Knative stops at the first bad key; here all of
//! them are reported, so that one edit can correct them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{ConfigMapSettings, ParsedConfigMap};
use crate::model::go_values::{self, GoDuration};
use crate::model::problem::Problem;

/// Key that holds examples and is never read (knative/pkg `configmap.ExampleKey`).
pub const EXAMPLE: &str = "_example";

/// Data of one ConfigMap while it is read, with the errors and warnings so far.
#[derive(Debug)]
pub struct ConfigMapReader<'a> {
    data: &'a BTreeMap<String, String>,
    /// Keys that the settings have asked for or accepted. Each other key gets a warning.
    known_keys: BTreeSet<&'a str>,
    /// Texts of keys of older releases, by their newer names.
    renamed_values: BTreeMap<&'static str, &'a str>,
    error_prefix: &'static str,
    problems: Vec<Problem>,
    warnings: Vec<String>,
}

impl<'a> ConfigMapReader<'a> {
    fn new(data: &'a BTreeMap<String, String>) -> Self {
        Self {
            data,
            known_keys: BTreeSet::from([EXAMPLE]),
            renamed_values: BTreeMap::new(),
            error_prefix: "",
            problems: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Accepts key names of older releases, each with its successor. The newer name wins where both are set.
    ///
    /// Call it before the successors are read: only then does [`get`](Self::get) find the older names.
    pub fn accept_renamed(&mut self, names: &[(&'static str, &'static str)]) {
        for &(old, new) in names {
            self.known_keys.insert(old);
            if let Some(text) = self.data.get(old) {
                self.warnings.push(format!("key {old:?} is of an older release: use {new:?}"));
                self.renamed_values.insert(new, text);
            }
        }
    }

    /// Accepts key names of older releases whose values have lost their meaning, each with its successor.
    pub fn accept_superseded(&mut self, names: &[(&'static str, &'static str)]) {
        for &(old, new) in names {
            self.known_keys.insert(old);
            if self.data.contains_key(old) {
                let message =
                    format!("key {old:?} is of an older release and has no effect: use {new:?}");
                self.warnings.push(message);
            }
        }
    }

    /// Accepts keys that have no effect here, each with the reason.
    pub fn accept_without_effect(&mut self, keys: &[(&'static str, &str)]) {
        for &(key, reason) in keys {
            self.known_keys.insert(key);
            if self.data.contains_key(key) {
                self.warnings.push(format!("key {key:?} has no effect: {reason}"));
            }
        }
    }

    /// Accepts a key whose feature does not exist here; warns unless its text is one of `usual_values`.
    pub fn warn_unless_usual(&mut self, key: &'static str, usual_values: &[&str], reason: &str) {
        let text = self.get(key).unwrap_or_default().trim();
        if !text.is_empty() && !usual_values.iter().any(|it| text.eq_ignore_ascii_case(it)) {
            self.warnings.push(format!("key {key:?} has no effect: {reason}"));
        }
    }

    /// Text of a key, or that of its older name.
    pub fn get(&mut self, key: &'static str) -> Option<&'a str> {
        self.known_keys.insert(key);
        self.data.get(key).map(String::as_str).or_else(|| self.renamed_values.get(key).copied())
    }

    /// All keys with their texts, for ConfigMaps whose keys are names of objects.
    pub fn all_keys(&mut self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        self.known_keys.extend(self.data.keys().map(String::as_str));
        let all = self.data.iter().map(|(key, text)| (key.as_str(), text.as_str()));
        all.filter(|(key, _)| *key != EXAMPLE)
    }

    /// All keys that start with `prefix`, each with the rest of its name and its text.
    pub fn keys_with_prefix(&mut self, prefix: &str) -> Vec<(&'a str, &'a str)> {
        let named = self.data.iter().filter(|(key, _)| key.starts_with(prefix));
        let mut values = Vec::new();
        for (key, text) in named {
            self.known_keys.insert(key);
            values.extend(key.strip_prefix(prefix).map(|rest| (rest, text.as_str())));
        }
        values
    }

    /// Accepts all keys that start with `prefix`, and warns that they have no effect.
    pub fn ignore_prefix(&mut self, prefix: &str, reason: &str) {
        for (rest, _) in self.keys_with_prefix(prefix) {
            self.warnings.push(format!("key \"{prefix}{rest}\" has no effect: {reason}"));
        }
    }

    /// Sets the text before messages on values that cannot be parsed.
    pub fn set_error_prefix(&mut self, prefix: &'static str) {
        self.error_prefix = prefix;
    }

    /// Adds an error whose message names the key.
    pub fn add_error(&mut self, message: impl Into<String>) {
        self.problems.push(Problem::new("", message));
    }

    /// Adds an error that carries the key itself.
    pub fn add_problem(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    /// Adds a warning for an accepted value.
    pub fn add_warning(&mut self, message: impl Into<String>) {
        self.warnings.push(message.into());
    }

    fn read_value<T>(
        &mut self,
        key: &'static str,
        target: &mut T,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) {
        match self.get(key).map(parse) {
            None => {}
            Some(Ok(value)) => *target = value,
            Some(Err(error)) => {
                let prefix = self.error_prefix;
                self.add_error(format!("{prefix}failed to parse {key:?}: {error}"));
            }
        }
    }

    /// Reads text, without spaces around it.
    pub fn read_text(&mut self, key: &'static str, target: &mut String) {
        self.read_value(key, target, |text| Ok(text.trim().to_owned()));
    }

    /// Reads a boolean in Go's forms.
    pub fn read_bool(&mut self, key: &'static str, target: &mut bool) {
        self.read_value(key, target, go_values::parse_bool);
    }

    /// Reads an integer that fits in 64 bits.
    pub fn read_int64(&mut self, key: &'static str, target: &mut i64) {
        self.read_value(key, target, |text| go_values::parse_int(text, 64));
    }

    /// Reads an integer that fits in 32 bits.
    pub fn read_int32(&mut self, key: &'static str, target: &mut i64) {
        self.read_value(key, target, |text| go_values::parse_int(text, 32));
    }

    /// Reads a finite decimal number.
    pub fn read_float(&mut self, key: &'static str, target: &mut f64) {
        self.read_value(key, target, go_values::parse_float);
    }

    /// Reads a duration in Go's form.
    pub fn read_duration(&mut self, key: &'static str, target: &mut GoDuration) {
        self.read_value(key, target, go_values::parse_duration);
    }

    /// Reads a quantity of a resource.
    pub fn read_quantity(&mut self, key: &'static str, target: &mut Option<Quantity>) {
        self.read_value(key, target, |text| go_values::parse_quantity(text).map(Some));
    }

    /// Reads names that are separated by commas.
    pub fn read_names(&mut self, key: &'static str, target: &mut BTreeSet<String>) {
        self.read_value(key, target, |text| {
            Ok(text.split(',').map(|it| it.trim().to_owned()).collect())
        });
    }

    fn warn_unknown(&mut self) {
        let unknown = self.data.keys().filter(|key| !self.known_keys.contains(key.as_str()));
        self.warnings
            .extend(unknown.map(|key| format!("key {key:?} is unknown and has no effect")));
    }
}

/// Keys that the settings of a ConfigMap read, whatever it holds.
#[cfg(test)]
pub(super) fn known<T: ConfigMapSettings>() -> BTreeSet<String> {
    let data = BTreeMap::new();
    let mut keys = ConfigMapReader::new(&data);
    T::read(&mut keys);
    keys.known_keys.into_iter().filter(|key| *key != EXAMPLE).map(str::to_owned).collect()
}

/// Reads the data of one ConfigMap: its settings with warnings, or everything that is wrong with it.
pub fn read<T: ConfigMapSettings>(
    data: &BTreeMap<String, String>,
) -> Result<ParsedConfigMap<T>, Vec<Problem>> {
    let mut keys = ConfigMapReader::new(data);
    let value = T::read(&mut keys);
    // After the settings are read, so that `known_keys` holds every key that they asked for.
    keys.warn_unknown();
    if keys.problems.is_empty() {
        Ok(ParsedConfigMap { value, warnings: keys.warnings })
    } else {
        Err(keys.problems)
    }
}
