//! Shell: the match of a request to a service of the RouteTable.

use std::sync::Arc;

use common::wire::{ClientAuth, MappedDomain, PathPrefix, RuleTimeouts};

use crate::routes::{
    gateway_rules::PickedBackend,
    path_match::{UnclearPath, strip_segments},
    service::RoutedService,
};

/// Service, with the DomainMapping or the rule of the Gateway API by which it was found.
#[derive(Debug)]
pub struct ServiceMatch {
    /// Service that was found by its host or port.
    pub service: Arc<RoutedService>,
    pub(crate) domain_index: Option<usize>,
    /// Backend of a rule of the Gateway API that the service is; `None`: no such rule chose it.
    pub(crate) picked_backend: Option<PickedBackend>,
}

impl ServiceMatch {
    /// DomainMapping that has the host; `None`: the service was found by its port, its name or a host of its own.
    pub fn domain(&self) -> Option<&MappedDomain> {
        self.service.domains().get(self.domain_index?)
    }

    /// Host of the DomainMapping, or of the listener or route of the Gateway API, which may have a wildcard; `None`: the
    /// service was found by its port, its name or a host of its own.
    pub fn listed_host(&self) -> Option<&str> {
        let of_rule = self.picked_backend.as_ref().map(|it| it.rule.host.as_str());
        of_rule.or_else(|| self.domain().map(|it| it.host.as_str()))
    }

    /// Rule of the host for certificates of clients; `None`: clients are asked for none.
    pub fn client_auth(&self) -> Option<&ClientAuth> {
        self.domain()?.client_auth.as_ref()
    }

    /// Prefix that pods do not receive; `None`: they receive the whole path.
    pub fn stripped_prefix(&self) -> Option<&PathPrefix> {
        let rule = self.domain()?.path_rule.as_ref()?;
        rule.strips_prefix.then_some(&rule.prefix)
    }

    /// Returns path and query of a request, which begin with `/`, as pods receive them. `None`: unchanged. Fails if a
    /// server could read the path without its prefix in two ways.
    pub fn changed_target(&self, target: &[u8]) -> Option<Result<Vec<u8>, UnclearPath>> {
        if let Some(picked) = &self.picked_backend {
            return picked.rule.rewritten_target(target);
        }
        let depth = self.stripped_prefix()?.depth();
        (depth > 0).then(|| strip_segments(target, depth))
    }

    /// Timeouts that a rule of the Gateway API states for the request, beside those of the Revision.
    pub fn rule_timeouts(&self) -> RuleTimeouts {
        self.picked_backend.as_ref().map(|it| it.rule.timeouts).unwrap_or_default()
    }

    /// Returns true if http from outside is redirected to https.
    pub fn redirects_to_https(&self) -> bool {
        match self.domain() {
            // Without TLS, no client can show the certificate that the host requires.
            Some(domain) => domain.redirects_to_https || requires_client_certificate(domain),
            None => self.service.gateway_rules.as_ref().is_some_and(|it| it.redirects_to_https),
        }
    }
}

/// Returns true if the host serves no client without a certificate.
fn requires_client_certificate(domain: &MappedDomain) -> bool {
    domain.client_auth.as_ref().is_some_and(|it| !it.is_optional)
}

impl From<Arc<RoutedService>> for ServiceMatch {
    fn from(service: Arc<RoutedService>) -> Self {
        Self { service, domain_index: None, picked_backend: None }
    }
}
