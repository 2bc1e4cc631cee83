//! Shell: the match of a request to a service of the RouteTable.

use std::sync::Arc;

use common::wire::{ClientAuth, MappedDomain, PathPrefix};

use crate::routes::{gateway_rules::GatewayRule, service::RoutedService};

/// Service, with the DomainMapping or the rule of the Gateway API by which it was found.
#[derive(Debug)]
pub struct ServiceMatch {
    /// Service that was found by its host or port.
    pub service: Arc<RoutedService>,
    pub(crate) domain_index: Option<usize>,
    /// Rule of the Gateway API that chose the service; `None`: no such rule did.
    pub(crate) gateway_rule: Option<Arc<GatewayRule>>,
}

impl ServiceMatch {
    /// DomainMapping that has the host; `None`: the service was found by its port, its name or a host of its own.
    pub fn domain(&self) -> Option<&MappedDomain> {
        self.service.domains().get(self.domain_index?)
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
        Self { service, domain_index: None, gateway_rule: None }
    }
}
