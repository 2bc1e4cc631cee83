//! Pure: keys of the indexes: each object is stored under a name that it contains itself.

use std::{
    borrow::Borrow,
    hash::{Hash, Hasher},
    sync::Arc,
};

use common::wire::NamespacedName;

use crate::{revisions::revision::ActivatorRevision, routes::service::RoutedService};

/// Object that is found by its own name.
#[derive(Debug)]
pub(super) struct NameIndexEntry<T>(pub(super) Arc<T>);

impl Borrow<NamespacedName> for NameIndexEntry<RoutedService> {
    fn borrow(&self) -> &NamespacedName {
        &self.0.name
    }
}

impl Borrow<NamespacedName> for NameIndexEntry<ActivatorRevision> {
    fn borrow(&self) -> &NamespacedName {
        &self.0.name
    }
}

impl<T> PartialEq for NameIndexEntry<T>
where
    Self: Borrow<NamespacedName>,
{
    fn eq(&self, other: &Self) -> bool {
        self.borrow() == other.borrow()
    }
}

impl<T> Eq for NameIndexEntry<T> where Self: Borrow<NamespacedName> {}

impl<T> Hash for NameIndexEntry<T>
where
    Self: Borrow<NamespacedName>,
{
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.borrow().hash(state);
    }
}

/// Service that is found by one of its hosts.
#[derive(Debug)]
pub(super) struct HostIndexEntry {
    pub(super) service: Arc<RoutedService>,
    /// Index of the host among the service's own hosts, followed by those of its DomainMappings.
    pub(super) host_index: usize,
}

impl Borrow<str> for HostIndexEntry {
    fn borrow(&self) -> &str {
        self.service
            .nth_host(self.host_index)
            .expect("an entry has the index of a host that its service has")
    }
}

impl PartialEq for HostIndexEntry {
    fn eq(&self, other: &Self) -> bool {
        let (own, others): (&str, &str) = (self.borrow(), other.borrow());
        own == others
    }
}

impl Eq for HostIndexEntry {}

impl Hash for HostIndexEntry {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let host: &str = self.borrow();
        host.hash(state);
    }
}
