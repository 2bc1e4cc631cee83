//! Shell: what the RouteTable says, ready for look-up while requests arrive.
//!
//! Ten thousand services may sleep here: each name stands once, in the thing that it names, and the indexes hold
//! nothing but references to that.

use std::{
    borrow::Borrow as _,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use common::{
    link::{Changes, RouteBatch},
    wire::{self, Domain, Ingress, Name, Path, PodPhase, RouteChange, RouteKey, TagRouting},
};
use tokio::sync::watch;

use crate::revision::{PodTold, PodsTold, Revision, RevisionSettings, Terms};

mod keys;

use keys::{ByHost, ByName};

/// Requests wait so long for a revision that has left the table to come back: another controller may know of it a little
/// later, and one that is made anew has the same name.
const AWAY: Duration = Duration::from_secs(2);

/// Look-ups by port, host and name. Shared by all connections; locks are held for single look-ups.
#[derive(Debug)]
pub struct Routes {
    settings: Arc<RevisionSettings>,
    index: RwLock<Index>,
    listed: watch::Sender<Listed>,
}

/// Whether the table names this activator: while it does, connections are led here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Listed {
    /// It never has, so it says nothing.
    #[default]
    Never,
    /// It does.
    Now,
    /// Not any more.
    NoMore,
}

/// One addressable name, as requests see it.
#[derive(Debug)]
pub struct Service {
    /// Namespace and name.
    pub name: Name,
    /// Revisions and their shares. Empty: nothing to route to yet.
    pub targets: Box<[Share]>,
    /// Whether new connections inside the cluster may go straight to pods.
    pub path: Path,
    /// Since when it has its present path.
    pub since: Instant,
    port: u16,
    hosts: Box<[Box<str>]>,
    ingress: Option<Box<Ingress>>,
}

/// A service, and the DomainMapping by which it was found.
#[derive(Debug)]
pub struct ByHostFound {
    /// The service.
    pub service: Arc<Service>,
    domain: Option<usize>,
}

impl ByHostFound {
    /// The DomainMapping.
    pub fn domain(&self) -> Option<&Domain> {
        self.service.domains().get(self.domain?)
    }

    /// Whether http from outside is led to https.
    pub fn redirects(&self) -> bool {
        match self.domain() {
            Some(domain) => domain.redirects,
            None => self.service.ingress.as_ref().is_some_and(|it| it.redirects),
        }
    }
}

impl From<Arc<Service>> for ByHostFound {
    fn from(service: Arc<Service>) -> Self {
        Self { service, domain: None }
    }
}

impl Service {
    /// What tags mean for its requests.
    pub fn tags(&self) -> Option<&TagRouting> {
        self.ingress.as_ref()?.tags.as_ref()
    }

    fn domains(&self) -> &[Domain] {
        self.ingress.as_ref().map_or(&[], |it| &it.domains)
    }

    /// Every host that reaches it from outside: its own, then its DomainMappings'.
    fn host(&self, at: usize) -> Option<&str> {
        let own = self.hosts.get(at).map(AsRef::as_ref);
        own.or_else(|| Some(self.domains().get(at - self.hosts.len())?.host.as_str()))
    }
}

/// One revision's share of a service.
#[derive(Debug)]
pub struct Share {
    /// The revision, which the table may not name.
    pub revision: Arc<Revision>,
    /// Its share in percent.
    pub percent: u8,
}

#[derive(Debug, Default)]
struct Index {
    services: HashSet<ByName<Service>>,
    by_port: HashMap<u16, Arc<Service>>,
    by_host: HashSet<ByHost>,
    /// Services that name a host which another one has.
    waiting: HashMap<Box<str>, Vec<ByHost>>,
    /// Those that the table names or somebody refers to.
    revisions: HashSet<ByName<Revision>>,
    /// Those of them that the table does not name, or not yet; since when.
    untold: BTreeMap<Name, Instant>,
    /// Pods by revision; revisions without any are not here.
    pods: BTreeMap<Name, PodsTold>,
    revision_of: HashMap<String, Name>,
    /// Where the activators are.
    activators: BTreeMap<String, Vec<IpAddr>>,
}

impl Routes {
    /// Nothing is routed yet.
    pub fn new(settings: RevisionSettings) -> Self {
        let listed = watch::Sender::new(Listed::Never);
        Self { settings: Arc::new(settings), index: RwLock::default(), listed }
    }

    /// The service behind a port of the activator.
    pub fn by_port(&self, port: u16) -> Option<Arc<Service>> {
        self.read().by_port.get(&port).cloned()
    }

    /// The service behind a host, lower case and without port.
    pub fn by_host(&self, host: &str) -> Option<ByHostFound> {
        let index = self.read();
        let ByHost { service, at } = index.by_host.get(host)?;
        let domain = at.checked_sub(service.hosts.len());
        Some(ByHostFound { service: Arc::clone(service), domain })
    }

    /// A service by name.
    pub fn by_name(&self, name: &Name) -> Option<Arc<Service>> {
        self.read().services.get(name).map(|it| Arc::clone(&it.0))
    }

    /// The Service that bears the name of a revision: all of its requests are that one's.
    pub fn by_revision(&self, name: &Name) -> Option<Arc<Service>> {
        let index = self.read();
        let revision = Arc::clone(&index.revisions.get(name)?.0);
        // One that is only referred to, or not any more: the table does not know it.
        if index.untold.contains_key(name) {
            return None;
        }
        Some(Arc::new(Service {
            name: name.clone(),
            targets: Box::new([Share { revision, percent: 100 }]),
            path: Path::Activator,
            since: Instant::now(),
            port: 0,
            hosts: Box::default(),
            ingress: None,
        }))
    }

    /// Whether the table names this activator, and every change of that.
    pub fn listed(&self) -> watch::Receiver<Listed> {
        self.listed.subscribe()
    }

    /// A revision by name.
    pub fn revision(&self, name: &Name) -> Option<Arc<Revision>> {
        self.read().revisions.get(name).map(|it| Arc::clone(&it.0))
    }

    /// A revision by name, whether the table names it or not: another activator may know of it earlier or longer.
    pub fn meet(&self, name: &Name) -> Arc<Revision> {
        let known = self.revision(name);
        known.unwrap_or_else(|| self.write().meet(name, &self.settings))
    }

    /// Other activators are known than before.
    pub fn settle(&self) {
        self.revisions().iter().for_each(|revision| revision.on_view());
    }

    /// Every revision that has pods.
    pub fn awake(&self) -> Vec<Arc<Revision>> {
        let index = self.read();
        let found = index.pods.keys().filter_map(|name| index.revisions.get(name));
        found.map(|it| Arc::clone(&it.0)).collect()
    }

    /// Every revision there is.
    pub fn revisions(&self) -> Vec<Arc<Revision>> {
        self.read().revisions.iter().map(|it| Arc::clone(&it.0)).collect()
    }

    /// Ports that should be open.
    pub fn ports(&self) -> BTreeSet<u16> {
        self.read().by_port.keys().copied().collect()
    }

    /// How many services and pods there are.
    pub fn counts(&self) -> (usize, usize) {
        let index = self.read();
        (index.services.len(), index.revision_of.len())
    }

    /// Forgets revisions that the table lacks once nobody refers to them: no service, no request.
    pub fn forget_left(&self) {
        if self.read().untold.is_empty() {
            return;
        }
        for name in self.write().forget_left() {
            self.settings.usage.gone(&name);
        }
    }

    /// Lets those go who wait at a revision that the table lacked for `AWAY` at `now`: no pod of it will come.
    pub fn give_up_left(&self, now: Instant) {
        let index = self.read();
        let long = |since: Instant| now.saturating_duration_since(since) >= AWAY;
        let left = index.untold.iter().filter(|(_, since)| long(**since));
        let found = left.filter_map(|(name, _)| index.revisions.get(name));
        let left: Vec<_> = found.map(|it| Arc::clone(&it.0)).collect();
        drop(index);
        left.iter().for_each(|revision| revision.give_up());
    }

    /// Takes over what changed in the table. Requests that wait for a pod that is ready now go at once.
    /// Returns whether other ports than before should be open.
    pub fn apply(&self, batch: RouteBatch) -> bool {
        let (mut touched, mut other_ports, mut other_peers) = (BTreeSet::new(), false, false);
        let mut index = self.write();
        let mut changes = batch.changes;
        if batch.is_whole {
            let gone = index.missing(&changes);
            changes.extend(gone.into_iter().map(|key| (key.clone(), RouteChange::Gone(key))));
        }
        for change in changes.into_values() {
            match change {
                RouteChange::Service(it) => other_ports |= index.set_service(it, &self.settings),
                RouteChange::Revision(it) => {
                    let terms = Terms::new(&it);
                    index.tell(&it.name, Some(terms), &self.settings);
                    touched.insert(it.name);
                }
                RouteChange::Pod(it) => touched.extend(index.set_pod(*it)),
                RouteChange::Gone(RouteKey::Service(name)) => {
                    other_ports |= index.remove_service(&name).is_some();
                }
                RouteChange::Gone(RouteKey::Revision(name)) => {
                    index.tell(&name, None, &self.settings);
                    touched.insert(name);
                }
                RouteChange::Gone(RouteKey::Pod(uid)) => touched.extend(index.remove_pod(&uid)),
                RouteChange::Activator(it) => {
                    let before = index.activators.insert(it.name, it.addresses.clone());
                    other_peers |= before != Some(it.addresses);
                }
                RouteChange::Gone(RouteKey::Activator(name)) => {
                    other_peers |= index.activators.remove(&name).is_some();
                }
                RouteChange::Replicas(_)
                | RouteChange::Settings(_)
                | RouteChange::Gone(RouteKey::Replicas(_) | RouteKey::Settings)
                | RouteChange::Synced => {}
            }
        }
        if other_peers {
            let all = index.activators.iter();
            let all = all.map(|(name, addresses)| (name.as_str().into(), addresses.clone()));
            let peers = &self.settings.peers;
            other_peers = peers.list(all);
            self.list(index.activators.contains_key(peers.view().own.as_str()));
        }
        drop(index);
        if other_peers {
            self.settle();
        }
        touched.iter().for_each(|name| self.update(name));
        self.forget_left();
        other_ports
    }

    fn list(&self, is_named: bool) {
        self.listed.send_if_modified(|listed| {
            let now = match (*listed, is_named) {
                (_, true) => Listed::Now,
                (Listed::Never, false) => Listed::Never,
                (Listed::Now | Listed::NoMore, false) => Listed::NoMore,
            };
            std::mem::replace(listed, now) != now
        });
    }

    fn update(&self, name: &Name) {
        let index = self.read();
        let Some(revision) = index.revisions.get(name).map(|it| Arc::clone(&it.0)) else { return };
        // A revision that the table does not name has no pods, whatever else it says.
        let pods = index.pods.get(name).filter(|_| !index.untold.contains_key(name)).cloned();
        drop(index);
        revision.set_pods(&pods.unwrap_or_default());
    }

    fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn first_by_name(all: &[ByHost]) -> Option<usize> {
    (0..all.len()).min_by_key(|at| &all[*at].service.name)
}

impl Index {
    /// Returns whether its port is another one than before.
    fn set_service(&mut self, told: wire::Service, settings: &Arc<RevisionSettings>) -> bool {
        let same_path = |it: &&ByName<Service>| it.0.path == told.path;
        let since = self.services.get(&told.name).filter(same_path).map(|it| it.0.since);
        let port_before = self.remove_service(&told.name);
        let targets = told.targets.into_iter().map(|target| Share {
            revision: self.meet(&target.revision, settings),
            percent: target.percent,
        });
        let service = Arc::new(Service {
            targets: targets.collect(),
            name: told.name,
            path: told.path,
            since: since.unwrap_or_else(Instant::now),
            port: told.activator_port.get(),
            hosts: told.hosts.into_iter().map(Into::into).collect(),
            ingress: told.ingress,
        });
        self.by_port.insert(service.port, Arc::clone(&service));
        for at in 0..service.hosts.len() + service.domains().len() {
            self.add_host(ByHost { service: Arc::clone(&service), at });
        }
        let port = service.port;
        self.services.insert(ByName(service));
        port_before != Some(port)
    }

    /// Returns its port.
    fn remove_service(&mut self, name: &Name) -> Option<u16> {
        let ByName(old) = self.services.take(name)?;
        // Another service may have taken over port or host in the same batch.
        if self.by_port.get(&old.port).is_some_and(|it| Arc::ptr_eq(it, &old)) {
            self.by_port.remove(&old.port);
        }
        for host in (0..).map_while(|at| old.host(at)) {
            self.remove_host(host, &old);
        }
        Some(old.port)
    }

    /// The controller names each host once. Should a table name one twice, the service that comes first by name has it,
    /// at every activator the same, in whatever order it was told.
    fn add_host(&mut self, new: ByHost) {
        let host: &str = new.borrow();
        let lost = match self.by_host.get(host) {
            Some(have) if have.service.name < new.service.name => new,
            Some(_) | None => match self.by_host.replace(new) {
                Some(before) => before,
                None => return,
            },
        };
        let host: &str = lost.borrow();
        self.waiting.entry(host.into()).or_default().push(lost);
    }

    fn remove_host(&mut self, host: &str, of: &Arc<Service>) {
        let is_its = |it: &ByHost| Arc::ptr_eq(&it.service, of);
        if self.by_host.get(host).is_some_and(is_its) {
            self.by_host.remove(host);
        }
        let Some(mut waiting) = self.waiting.remove(host) else { return };
        waiting.retain(|it| !is_its(it));
        if let (None, Some(first)) = (self.by_host.get(host), first_by_name(&waiting)) {
            self.by_host.insert(waiting.swap_remove(first));
        }
        if !waiting.is_empty() {
            self.waiting.insert(host.into(), waiting);
        }
    }

    /// The revision as requests see it, whether the table names it or not.
    fn meet(&mut self, name: &Name, settings: &Arc<RevisionSettings>) -> Arc<Revision> {
        if let Some(known) = self.revisions.get(name) {
            return Arc::clone(&known.0);
        }
        let revision = Arc::new(Revision::new(name.clone(), Arc::clone(settings)));
        self.untold.insert(name.clone(), Instant::now());
        self.revisions.insert(ByName(Arc::clone(&revision)));
        revision
    }

    /// One that the table lacks leaves; requests that wait there stay for a while, should it come back.
    fn tell(&mut self, name: &Name, terms: Option<Terms>, settings: &Arc<RevisionSettings>) {
        if terms.is_some() {
            self.meet(name, settings).tell(terms);
            self.untold.remove(name);
        } else if let Some(known) = self.revisions.get(name) {
            known.0.tell(None);
            self.untold.entry(name.clone()).or_insert_with(Instant::now);
        }
    }

    /// Returns the names of those it forgot.
    fn forget_left(&mut self) -> Vec<Name> {
        // References come from here or from another reference: who has the only one keeps it.
        let is_left = |name: &&Name| {
            let known = self.revisions.get(*name);
            known.is_some_and(|it| Arc::strong_count(&it.0) == 1 && !it.0.has_slots())
        };
        let left: Vec<Name> = self.untold.keys().filter(is_left).cloned().collect();
        for name in &left {
            self.revisions.remove(name);
            self.untold.remove(name);
        }
        left
    }

    /// Returns the revisions whose pods have changed.
    fn set_pod(&mut self, told: wire::Pod) -> Vec<Name> {
        let mut touched: Vec<Name> = self.remove_pod(&told.uid).into_iter().collect();
        let is_ready = told.phase == PodPhase::Ready;
        let pod = PodTold { address: told.address, is_ready, name: told.name.into() };
        self.pods.entry(told.revision.clone()).or_default().insert(told.uid.clone(), pod);
        self.revision_of.insert(told.uid, told.revision.clone());
        touched.push(told.revision);
        touched
    }

    /// Returns its revision.
    fn remove_pod(&mut self, uid: &str) -> Option<Name> {
        let revision = self.revision_of.remove(uid)?;
        if let Some(pods) = self.pods.get_mut(&revision) {
            pods.remove(uid);
            if pods.is_empty() {
                self.pods.remove(&revision);
            }
        }
        Some(revision)
    }

    /// Subjects that a whole table does not name any more.
    fn missing(&self, named: &Changes) -> Vec<RouteKey> {
        let services = self.services.iter().map(|it| RouteKey::Service(it.0.name.clone()));
        let revisions = self.revisions.iter().map(|it| RouteKey::Revision(it.0.name.clone()));
        let pods = self.revision_of.keys().cloned().map(RouteKey::Pod);
        let activators = self.activators.keys().cloned().map(RouteKey::Activator);
        let all = services.chain(revisions).chain(pods).chain(activators);
        all.filter(|key| !named.contains_key(key)).collect()
    }
}
