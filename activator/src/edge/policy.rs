//! Shell: policy for proxies before the gateway and for protocols to switch to, as it is now.

use std::sync::{Arc, PoisonError, RwLock};

use common::{
    link::RouteBatch,
    wire::{EdgeSettings, HstsPolicy, RouteChange, RouteKey, TlsSettings},
};
use tracing::info;

/// Policy of operators for requests from outside: the settings at the start and those of the RouteTable, combined.
#[derive(Debug)]
pub struct EdgePolicy {
    /// Settings of the command line.
    startup: EdgeSettings,
    /// Settings in force: those of the command line and of the RouteTable.
    current: RwLock<Arc<EdgeSettings>>,
}

impl EdgePolicy {
    /// Creates the policy from the settings of the command line.
    pub fn new(startup: EdgeSettings) -> Self {
        Self { current: RwLock::new(Arc::new(startup.clone())), startup }
    }

    /// Policy for a request that arrives now.
    pub fn current(&self) -> Arc<EdgeSettings> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies the settings of a batch of the RouteTable.
    pub fn apply_batch(&self, batch: &RouteBatch) {
        // A snapshot without settings, or their removal, resets them; any other batch without them leaves them
        // unchanged.
        let settings = match batch.changes.get(&RouteKey::Settings) {
            Some(RouteChange::Settings(it)) => it.edge.clone(),
            None if !batch.is_snapshot => return,
            Some(_) | None => EdgeSettings::default(),
        };
        // Lists are joined, and what the command line requires stays required. Of single values the table's counts.
        let next = EdgeSettings {
            trusted_proxies: [&*self.startup.trusted_proxies, &settings.trusted_proxies].concat(),
            requires_proxy_protocol: self.startup.requires_proxy_protocol
                || settings.requires_proxy_protocol,
            allowed_upgrades: [&*self.startup.allowed_upgrades, &settings.allowed_upgrades]
                .concat(),
            allows_underscores: self.startup.allows_underscores || settings.allows_underscores,
            certificates: [&*self.startup.certificates, &settings.certificates].concat(),
            https_port: settings.https_port.or(self.startup.https_port),
            hsts: settings.hsts.or_else(|| self.startup.hsts.clone()),
            tls: join_tls(&self.startup.tls, settings.tls),
            is_sni_strict: self.startup.is_sni_strict || settings.is_sni_strict,
            tcp_idle_timeout: settings.tcp_idle_timeout.or(self.startup.tcp_idle_timeout),
            trusted_ingresses: [&*self.startup.trusted_ingresses, &settings.trusted_ingresses]
                .concat(),
        };
        let mut now = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if **now != next {
            // Without `..`, so that a new setting cannot be left out of the log.
            let EdgeSettings {
                trusted_proxies,
                requires_proxy_protocol,
                allowed_upgrades,
                allows_underscores,
                certificates,
                https_port,
                hsts,
                tls,
                is_sni_strict,
                tcp_idle_timeout,
                trusted_ingresses,
            } = &next;
            info!(
                ?trusted_proxies,
                proxy_protocol = requires_proxy_protocol,
                upgrades = ?allowed_upgrades,
                underscores = allows_underscores,
                ?certificates,
                ?https_port,
                hsts = hsts.as_ref().map(HstsPolicy::as_str),
                ?tls,
                strict_sni = is_sni_strict,
                ?tcp_idle_timeout,
                ?trusted_ingresses,
                "edge policy set"
            );
            *now = Arc::new(next);
        }
    }
}

/// Joins the settings of TLS of the command line and of the RouteTable. The higher version counts, and the ciphers of
/// the table if it has any. If none of these is of an accepted version, those of the command line count, or else all.
fn join_tls(startup: &TlsSettings, table: TlsSettings) -> TlsSettings {
    let ciphers = if table.ciphers.is_empty() { startup.ciphers.clone() } else { table.ciphers };
    let min_version = table.min_version.max(startup.min_version);
    let joined =
        [ciphers, startup.ciphers.clone()].map(|ciphers| TlsSettings { min_version, ciphers });
    let usable = joined.into_iter().find(|it| it.check().is_ok());
    usable.unwrap_or(TlsSettings { min_version, ciphers: Vec::new() })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use common::wire::{GlobalSettings, NamespacedName, TlsCipher, TlsMinVersion};

    use super::*;

    #[test]
    fn the_https_port_of_the_table_goes_before_the_setting() {
        let startup = EdgeSettings { https_port: NonZeroU16::new(8443), ..EdgeSettings::default() };
        let policy = EdgePolicy::new(startup);
        let certificates = vec![NamespacedName::new("rouse-system", "wildcard")];
        let in_force = |port: u16| {
            let https_port = NonZeroU16::new(port);
            let edge = EdgeSettings {
                https_port,
                certificates: certificates.clone(),
                ..EdgeSettings::default()
            };
            let settings = GlobalSettings { edge, ..GlobalSettings::default() };
            let changes = [(RouteKey::Settings, RouteChange::Settings(settings))].into();
            policy.apply_batch(&RouteBatch { changes, ..RouteBatch::default() });
            policy.current()
        };
        assert_eq!(in_force(30_443).https_port, NonZeroU16::new(30_443));
        assert_eq!(in_force(0).https_port, NonZeroU16::new(8443), "0: the activator's own setting");
        assert_eq!(in_force(0).certificates, certificates);
    }

    #[test]
    fn sni_is_strict_by_either_setting() {
        for (startup, table, expected) in
            [(false, false, false), (false, true, true), (true, false, true), (true, true, true)]
        {
            let edge = |is_sni_strict| EdgeSettings { is_sni_strict, ..EdgeSettings::default() };
            let policy = EdgePolicy::new(edge(startup));
            let settings = GlobalSettings { edge: edge(table), ..GlobalSettings::default() };
            let changes = [(RouteKey::Settings, RouteChange::Settings(settings))].into();
            policy.apply_batch(&RouteBatch { changes, ..RouteBatch::default() });
            assert_eq!(policy.current().is_sni_strict, expected, "{startup} {table}");
        }
    }

    #[test]
    fn policies_of_tls_join_those_of_the_command_line() {
        let [low, high] = [TlsMinVersion::Tls12, TlsMinVersion::Tls13];
        let [old, new] = [TlsCipher::EcdheRsaAes128GcmSha256, TlsCipher::Aes128GcmSha256];
        let tls = |min_version, ciphers: &[TlsCipher]| TlsSettings {
            min_version,
            ciphers: ciphers.to_vec(),
        };
        for (startup, table, joined) in [
            (tls(low, &[]), tls(high, &[]), tls(high, &[])),
            (tls(high, &[]), tls(low, &[]), tls(high, &[])),
            (tls(low, &[old]), tls(low, &[]), tls(low, &[old])),
            (tls(low, &[old]), tls(low, &[new]), tls(low, &[new])),
            (tls(low, &[old]), tls(high, &[]), tls(high, &[])),
            (tls(high, &[new]), tls(low, &[old, new]), tls(high, &[old, new])),
            (tls(high, &[new]), tls(low, &[old]), tls(high, &[new])),
            (tls(low, &[new]), tls(high, &[old]), tls(high, &[new])),
        ] {
            assert_eq!(join_tls(&startup, table), joined, "{startup:?}");
        }
        let hsts = |text| HstsPolicy::parse(text).ok();
        let startup = EdgeSettings { hsts: hsts("max-age=1"), ..EdgeSettings::default() };
        let policy = EdgePolicy::new(startup);
        for (table, expected) in [(hsts("max-age=2"), "max-age=2"), (None, "max-age=1")] {
            let edge = EdgeSettings { hsts: table, ..EdgeSettings::default() };
            let settings = GlobalSettings { edge, ..GlobalSettings::default() };
            let changes = [(RouteKey::Settings, RouteChange::Settings(settings))].into();
            policy.apply_batch(&RouteBatch { changes, ..RouteBatch::default() });
            assert_eq!(policy.current().hsts, hsts(expected));
        }
    }
}
