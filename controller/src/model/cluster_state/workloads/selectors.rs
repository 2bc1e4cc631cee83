//! Pure: index of the selectors of scaled Services, to find those that match an object's labels.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::NamespacedName;
use smol_str::SmolStr;

use crate::model::cluster_state::CompactStringMap;

/// Selectors of the scaled Services.
#[derive(Clone, Debug, Default)]
pub(super) struct SelectorIndex {
    selectors: BTreeMap<NamespacedName, CompactStringMap>,
    /// Services by their namespace and the first pair of their selector. An object that a selector matches has this
    /// label, so only the Services of its own labels are compared.
    by_first_pair: BTreeMap<(SmolStr, Box<str>, Box<str>), BTreeSet<SmolStr>>,
}

impl SelectorIndex {
    /// Returns the selector of a Service.
    pub(super) fn get(&self, service: &NamespacedName) -> Option<&CompactStringMap> {
        self.selectors.get(service)
    }

    /// Sets the selector of a Service, which has at least one pair; `None` removes it.
    pub(super) fn set(&mut self, service: &NamespacedName, selector: Option<CompactStringMap>) {
        let previous = match &selector {
            Some(selector) => self.selectors.insert(service.clone(), selector.clone()),
            None => self.selectors.remove(service),
        };
        // The index by the first pair finds the Services of an object without trying all selectors of the namespace.
        if let Some(pair) = previous.as_ref().and_then(|it| first_pair(service, it))
            && let Some(services) = self.by_first_pair.get_mut(&pair)
        {
            services.remove(&service.name);
            if services.is_empty() {
                self.by_first_pair.remove(&pair);
            }
        }
        if let Some(pair) = selector.as_ref().and_then(|it| first_pair(service, it)) {
            self.by_first_pair.entry(pair).or_default().insert(service.name.clone());
        }
    }

    /// Returns the Services of this namespace whose selectors match these labels.
    pub(super) fn matching(
        &self,
        namespace: &SmolStr,
        labels: &CompactStringMap,
    ) -> BTreeSet<NamespacedName> {
        // Nearly all namespaces have no scaled Service.
        if self.selectors.is_empty() {
            return BTreeSet::new();
        }
        let pairs = labels.iter().map(|(key, value)| (namespace.clone(), key.into(), value.into()));
        let services = pairs.filter_map(|it| self.by_first_pair.get(&it)).flatten();
        let names = services.map(|it| NamespacedName::new(namespace.clone(), it.clone()));
        names
            .filter(|it| self.selectors.get(it).is_some_and(|it| it.is_subset_of(labels)))
            .collect()
    }
}

/// Returns the key of a Service in the index; `None` for an empty selector, which matches nothing.
fn first_pair(
    service: &NamespacedName,
    selector: &CompactStringMap,
) -> Option<(SmolStr, Box<str>, Box<str>)> {
    let (key, value) = selector.iter().next()?;
    Some((service.namespace.clone(), key.into(), value.into()))
}
