//! Shell: what the RouteTable says, ready for look-up while requests arrive.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use common::wire::{self, Name, Pod, RouteKey, RouteTable};

use crate::revision::{Revision, RevisionSettings};

pub use common::wire::Service;

/// Look-ups by port, host and name. Shared by all connections; locks are held for single look-ups.
#[derive(Debug)]
pub struct Routes {
    settings: RevisionSettings,
    index: RwLock<Index>,
}

#[derive(Debug, Default)]
struct Index {
    services: HashMap<Name, Arc<Service>>,
    by_port: HashMap<u16, Arc<Service>>,
    by_host: HashMap<String, Arc<Service>>,
    revisions: HashMap<Name, Arc<Revision>>,
    /// Revisions the table lacks, for which requests still wait: it may name them again.
    leaving: HashMap<Name, Arc<Revision>>,
    /// Pods by revision, as the table has them.
    pods_of: BTreeMap<Name, BTreeSet<String>>,
    revision_of: HashMap<String, Name>,
}

impl Routes {
    /// Nothing is routed yet.
    pub fn new(settings: RevisionSettings) -> Self {
        Self { settings, index: RwLock::default() }
    }

    /// The service behind a port of the activator.
    pub fn by_port(&self, port: u16) -> Option<Arc<Service>> {
        self.read().by_port.get(&port).cloned()
    }

    /// The service behind a host, lower case and without port.
    pub fn by_host(&self, host: &str) -> Option<Arc<Service>> {
        self.read().by_host.get(host).cloned()
    }

    /// A revision by name.
    pub fn revision(&self, name: &Name) -> Option<Arc<Revision>> {
        self.read().revisions.get(name).cloned()
    }

    /// Every revision.
    pub fn revisions(&self) -> Vec<Arc<Revision>> {
        self.read().revisions.values().cloned().collect()
    }

    /// Ports that should be open.
    pub fn ports(&self) -> BTreeSet<u16> {
        self.read().by_port.keys().copied().collect()
    }

    /// Forgets revisions that the table lacks once nobody waits for them.
    pub fn forget_left(&self) {
        if self.read().leaving.is_empty() {
            return;
        }
        self.write().leaving.retain(|name, revision| {
            let waits = revision.waiting() > 0;
            if !waits {
                self.settings.usage.gone(name);
            }
            waits
        });
    }

    /// Takes over what changed in `table`. Requests that wait for a pod that is ready now go at once.
    /// Returns whether other ports than before should be open.
    pub fn apply(&self, table: &RouteTable, changed: &BTreeSet<RouteKey>) -> bool {
        let (mut revisions, mut other_ports) = (BTreeSet::new(), false);
        {
            let mut index = self.write();
            for key in changed {
                match key {
                    RouteKey::Service(name) => {
                        other_ports |= index.set_service(name, table.services.get(name));
                    }
                    RouteKey::Revision(name) => drop(revisions.insert(name.clone())),
                    RouteKey::Pod(uid) => revisions.extend(index.set_pod(uid, table.pods.get(uid))),
                    RouteKey::Activator(_) => {}
                }
            }
        }
        for name in revisions {
            self.update(&name, table);
        }
        other_ports
    }

    fn update(&self, name: &Name, table: &RouteTable) {
        let told = table.revisions.get(name);
        let (revision, uids) = {
            let mut index = self.write();
            let uids = index.pods_of.get(name).cloned().unwrap_or_default();
            (index.meet(name, told, &self.settings), uids)
        };
        let pods: Vec<&Pod> = uids.iter().filter_map(|uid| table.pods.get(uid)).collect();
        match revision {
            Some(revision) => revision.update(told, &pods),
            None if self.read().leaving.contains_key(name) => {}
            None => self.settings.usage.gone(name),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    /// Returns whether its port is another one than before.
    fn set_service(&mut self, name: &Name, told: Option<&Service>) -> bool {
        let old = self.services.remove(name);
        if let Some(old) = &old {
            // Another service may have taken over port or host in the same batch.
            let port = old.activator_port.get();
            remove_own(&mut self.by_port, &port, old);
            for host in &old.hosts {
                remove_own(&mut self.by_host, host, old);
            }
        }
        let port_before = old.map(|it| it.activator_port);
        let Some(told) = told else { return port_before.is_some() };
        let service = Arc::new(told.clone());
        self.by_port.insert(service.activator_port.get(), Arc::clone(&service));
        for host in &service.hosts {
            self.by_host.insert(host.clone(), Arc::clone(&service));
        }
        self.services.insert(name.clone(), service);
        port_before != Some(told.activator_port)
    }

    /// Returns the revisions whose pods have changed.
    fn set_pod(&mut self, uid: &str, told: Option<&Pod>) -> BTreeSet<Name> {
        let mut touched = BTreeSet::new();
        if let Some(old) = self.revision_of.remove(uid) {
            if let Some(pods) = self.pods_of.get_mut(&old) {
                pods.remove(uid);
            }
            if self.pods_of.get(&old).is_some_and(BTreeSet::is_empty) {
                self.pods_of.remove(&old);
            }
            touched.insert(old);
        }
        if let Some(pod) = told {
            self.pods_of.entry(pod.revision.clone()).or_default().insert(uid.to_owned());
            self.revision_of.insert(uid.to_owned(), pod.revision.clone());
            touched.insert(pod.revision.clone());
        }
        touched
    }

    /// The revision as requests see it. One that the table lacks leaves; requests that wait there stay until
    /// their time is up or it comes back.
    fn meet(
        &mut self,
        name: &Name,
        told: Option<&wire::Revision>,
        settings: &RevisionSettings,
    ) -> Option<Arc<Revision>> {
        if told.is_none() {
            let gone = self.revisions.remove(name)?;
            gone.update(None, &[]);
            if gone.waiting() > 0 {
                self.leaving.insert(name.clone(), gone);
            }
            return None;
        }
        if let Some(back) = self.leaving.remove(name) {
            self.revisions.insert(name.clone(), back);
        }
        let fresh = || Arc::new(Revision::new(name.clone(), settings.clone()));
        Some(Arc::clone(self.revisions.entry(name.clone()).or_insert_with(fresh)))
    }
}

fn remove_own<K: Eq + std::hash::Hash>(
    index: &mut HashMap<K, Arc<Service>>,
    key: &K,
    own: &Arc<Service>,
) {
    if index.get(key).is_some_and(|it| Arc::ptr_eq(it, own)) {
        index.remove(key);
    }
}
