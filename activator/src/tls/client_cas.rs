//! Shell: authorities of client certificates in force, and the settings of handshakes that ask for these.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak},
};

use common::{
    certificates::{ClientCaFault, load_client_ca},
    link::RouteBatch,
    wire::{ClientCaMaterial, NamespacedName, RouteChange, RouteKey},
};
use rustls::{RootCertStore, ServerConfig};
use tracing::{info, warn};

use super::{held_certificate::UsableCertificate, server_config::client_auth_config};

/// Authorities of client certificates in force, by the name of their Secret.
///
/// Handshakes look them up; the stream of routes changes them. Open connections keep those of their handshake.
#[derive(Debug, Default)]
pub struct ClientCas {
    held: RwLock<BTreeMap<NamespacedName, Arc<UsableClientCa>>>,
}

/// Authorities of client certificates that handshakes can ask for.
pub struct UsableClientCa {
    material: Arc<ClientCaMaterial>,
    roots: Arc<RootCertStore>,
    /// Settings of handshakes, made when the first client needs them.
    configs: Mutex<Vec<ClientConfig>>,
}

/// Settings of handshakes that present one certificate and ask for another.
struct ClientConfig {
    /// Certificate that is presented; without a value once it has been replaced.
    certificate: Weak<UsableCertificate>,
    is_optional: bool,
    config: Arc<ServerConfig>,
}

impl ClientCas {
    /// Authorities in force under this name.
    pub fn get(&self, name: &NamespacedName) -> Option<Arc<UsableClientCa>> {
        self.read().get(name).cloned()
    }

    /// Applies the authorities of a batch of the RouteTable, except removals. Returns the names to
    /// [`remove`](Self::remove) once no host of the table needs them.
    ///
    /// Authorities that cannot be used, or an entry without any, leave those from before in force.
    pub fn apply_batch(&self, batch: &RouteBatch) -> Vec<NamespacedName> {
        // Their keys come behind all others, of which there may be very many.
        let first = RouteKey::ClientCa(NamespacedName::EMPTY);
        let mut removed = Vec::new();
        for (key, change) in batch.changes.range(first..) {
            match (key, change) {
                (RouteKey::ClientCa(name), RouteChange::ClientCa(entry)) => {
                    if let Some(material) = &entry.material {
                        self.offer(name, material);
                    }
                }
                (RouteKey::ClientCa(name), _) => removed.push(name.clone()),
                _ => {}
            }
        }
        if batch.is_snapshot {
            let held = self.read();
            let is_unnamed = |name: &&NamespacedName| {
                !batch.changes.contains_key(&RouteKey::ClientCa((*name).clone()))
            };
            removed.extend(held.keys().filter(is_unnamed).cloned());
        }
        removed
    }

    /// Removes authorities. Hosts that still name them accept no client.
    pub fn remove(&self, names: &[NamespacedName]) {
        if names.is_empty() {
            return;
        }
        let mut held = self.write();
        for name in names {
            if held.remove(name).is_some() {
                info!(client_ca = %name, "client CA removed");
            }
        }
    }

    fn offer(&self, name: &NamespacedName, material: &Arc<ClientCaMaterial>) {
        let before = self.get(name);
        // Unchanged authorities keep the settings of handshakes that were made from them.
        if before.as_ref().is_some_and(|it| it.material == *material) {
            return;
        }
        match UsableClientCa::new(Arc::clone(material)) {
            Ok(next) => {
                info!(client_ca = %name, certificates = next.roots.len(), "client CA in force");
                self.write().insert(name.clone(), Arc::new(next));
            }
            Err(fault) => {
                // The last usable authorities stay in force: without any, no client would be accepted.
                warn!(client_ca = %name, %fault, kept = before.is_some(), "client CA cannot be used");
            }
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<NamespacedName, Arc<UsableClientCa>>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<NamespacedName, Arc<UsableClientCa>>> {
        self.held.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UsableClientCa {
    fn new(material: Arc<ClientCaMaterial>) -> Result<Self, ClientCaFault> {
        let roots = Arc::new(load_client_ca(&material)?);
        Ok(Self { material, roots, configs: Mutex::default() })
    }

    /// Returns the settings of handshakes that present `certificate` and ask clients for one of these authorities.
    /// `is_optional`: clients may have none. The settings are made once for each certificate.
    pub fn config(
        &self,
        certificate: &Arc<UsableCertificate>,
        is_optional: bool,
    ) -> Result<Arc<ServerConfig>, rustls::Error> {
        let mut configs = self.configs.lock().unwrap_or_else(PoisonError::into_inner);
        let is_wanted = |it: &ClientConfig| {
            it.is_optional == is_optional
                // The weak reference keeps the address from another use.
                && std::ptr::eq(it.certificate.as_ptr(), Arc::as_ptr(certificate))
        };
        if let Some(known) = configs.iter().find(|it| is_wanted(it)) {
            return Ok(Arc::clone(&known.config));
        }
        configs.retain(|it| it.certificate.strong_count() > 0);
        let key = Arc::clone(&certificate.key);
        let config = client_auth_config(key, &certificate.protocols, &self.roots, is_optional)?;
        configs.push(ClientConfig {
            certificate: Arc::downgrade(certificate),
            is_optional,
            config: Arc::clone(&config),
        });
        Ok(config)
    }
}

impl fmt::Debug for UsableClientCa {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The settings hold private keys of hosts.
        out.debug_struct("UsableClientCa").field("material", &self.material).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use common::{certificates::load, fixtures::certificates::TestAuthority, wire::ClientCaEntry};

    use super::*;
    use crate::tls::server_config::HandshakeProtocols;

    fn name(secret: &str) -> NamespacedName {
        NamespacedName::new("default", secret)
    }

    fn received(secret: &str, authority: &TestAuthority) -> RouteChange {
        RouteChange::ClientCa(authority.client_ca_entry(&name(secret)))
    }

    fn without_material(secret: &str) -> RouteChange {
        RouteChange::ClientCa(ClientCaEntry { name: name(secret), material: None })
    }

    fn broken(secret: &str) -> RouteChange {
        let material = Some(Arc::new(ClientCaMaterial(vec![b"no certificate".to_vec()])));
        RouteChange::ClientCa(ClientCaEntry { name: name(secret), material })
    }

    fn removed(secret: &str) -> RouteChange {
        RouteChange::Removed(RouteKey::ClientCa(name(secret)))
    }

    /// Applies a batch as the forwarder does, without routes between.
    fn apply(cas: &ClientCas, is_snapshot: bool, changes: impl IntoIterator<Item = RouteChange>) {
        let with_key = |change: RouteChange| Some((change.key()?, change));
        let changes = changes.into_iter().filter_map(with_key).collect();
        let batch = RouteBatch { is_snapshot, changes, ..RouteBatch::default() };
        let gone = cas.apply_batch(&batch);
        cas.remove(&gone);
    }

    fn held(cas: &ClientCas, secret: &str) -> Option<Arc<ClientCaMaterial>> {
        cas.get(&name(secret)).map(|it| Arc::clone(&it.material))
    }

    fn certificate() -> Arc<UsableCertificate> {
        let material = Arc::new(TestAuthority::new().issue(&["a.example"]).material());
        let loaded = load(&material).unwrap();
        let protocols = HandshakeProtocols::default();
        Arc::new(UsableCertificate::new(material, loaded, protocols).unwrap())
    }

    #[test]
    fn nothing_but_usable_authorities_replaces_those_in_force() {
        let (cas, [one, other]) = (ClientCas::default(), [(); 2].map(|()| TestAuthority::new()));
        for entry in [without_material("a"), broken("a")] {
            apply(&cas, true, [entry]);
            assert_eq!(held(&cas, "a"), None, "closed");
        }
        apply(&cas, false, [received("a", &one)]);
        let first = held(&cas, "a");
        assert_eq!(first.as_deref(), Some(&one.client_ca()));
        for kept in [without_material("a"), broken("a")] {
            apply(&cas, true, [kept.clone()]);
            apply(&cas, false, [kept]);
            assert_eq!(held(&cas, "a"), first);
        }
        apply(&cas, false, [received("a", &other)]);
        assert_eq!(held(&cas, "a").as_deref(), Some(&other.client_ca()));
    }

    #[test]
    fn authorities_leave_by_removal_or_by_a_snapshot_without_them() {
        let (cas, authority) = (ClientCas::default(), TestAuthority::new());
        apply(&cas, true, ["a", "b"].map(|it| received(it, &authority)));
        apply(&cas, false, [removed("a")]);
        assert_eq!((held(&cas, "a"), held(&cas, "b").is_some()), (None, true));
        apply(&cas, true, []);
        assert_eq!(held(&cas, "b"), None);
    }

    #[test]
    fn removals_wait_until_the_routes_are_applied() {
        let (cas, authority) = (ClientCas::default(), TestAuthority::new());
        apply(&cas, true, [received("a", &authority)]);
        let changes = [(RouteKey::ClientCa(name("a")), removed("a"))].into();
        let gone = cas.apply_batch(&RouteBatch { changes, ..RouteBatch::default() });
        assert_eq!(gone, [name("a")]);
        assert!(held(&cas, "a").is_some());
    }

    #[test]
    fn settings_are_made_once_for_each_certificate_and_rule() {
        let (cas, authority) = (ClientCas::default(), TestAuthority::new());
        apply(&cas, true, [received("a", &authority)]);
        let ca = cas.get(&name("a")).unwrap();
        let (one, other) = (certificate(), certificate());
        let first = ca.config(&one, false).unwrap();
        assert!(Arc::ptr_eq(&first, &ca.config(&one, false).unwrap()));
        assert!(!Arc::ptr_eq(&first, &ca.config(&one, true).unwrap()));
        assert!(!Arc::ptr_eq(&first, &ca.config(&other, false).unwrap()));
        assert_eq!(ca.configs.lock().unwrap().len(), 3);
        drop(one);
        let _third = ca.config(&certificate(), false).unwrap();
        assert_eq!(ca.configs.lock().unwrap().len(), 2, "those of a replaced one are gone");
    }
}
