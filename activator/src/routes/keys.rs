//! Pure: keys of the indexes: each object is stored under a name that it contains itself.

use std::{
    borrow::Borrow,
    hash::{Hash, Hasher},
    sync::Arc,
};

use common::wire::Name;

use super::Service;
use crate::revision::Revision;

/// Object that is found by its own name.
#[derive(Debug)]
pub(super) struct ByName<T>(pub(super) Arc<T>);

impl Borrow<Name> for ByName<Service> {
    fn borrow(&self) -> &Name {
        &self.0.name
    }
}

impl Borrow<Name> for ByName<Revision> {
    fn borrow(&self) -> &Name {
        &self.0.name
    }
}

impl<T> PartialEq for ByName<T>
where
    Self: Borrow<Name>,
{
    fn eq(&self, other: &Self) -> bool {
        self.borrow() == other.borrow()
    }
}

impl<T> Eq for ByName<T> where Self: Borrow<Name> {}

impl<T> Hash for ByName<T>
where
    Self: Borrow<Name>,
{
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.borrow().hash(state);
    }
}

/// Service that is found by one of its hosts.
#[derive(Debug)]
pub(super) struct ByHost {
    pub(super) service: Arc<Service>,
    /// Number of the host among the service's hosts.
    pub(super) at: usize,
}

impl Borrow<str> for ByHost {
    fn borrow(&self) -> &str {
        self.service.host(self.at).expect("the index holds only places that the service has")
    }
}

impl PartialEq for ByHost {
    fn eq(&self, other: &Self) -> bool {
        let (own, others): (&str, &str) = (self.borrow(), other.borrow());
        own == others
    }
}

impl Eq for ByHost {}

impl Hash for ByHost {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let host: &str = self.borrow();
        host.hash(state);
    }
}
