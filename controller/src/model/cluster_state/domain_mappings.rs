//! Pure: domains of users, which map to services, and the namespaces that own them.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{
    HstsPolicy, NamespacedName, PathPrefix, PathRule, is_dns_subdomain, wildcard_suffix,
};

use super::{ClientAuthSpec, CompactStringMap, ConditionSet, ObjectMetaSummary};
use crate::model::knative::key;

/// Domains of users, with the namespaces that own them.
#[derive(Clone, Debug, Default)]
pub struct ObservedDomains {
    /// DomainMappings of all namespaces, by name.
    pub mappings: BTreeMap<NamespacedName, DomainMappingState>,
    /// DomainMappings by the name that they map their domain to.
    pub mappings_by_target: BTreeMap<NamespacedName, BTreeSet<NamespacedName>>,
    /// DomainMappings of all namespaces by their host.
    pub mappings_by_host: BTreeMap<Box<str>, BTreeSet<NamespacedName>>,
    /// ClusterDomainClaims, by the domain that each reserves.
    pub claims: BTreeMap<String, DomainClaimState>,
}

impl ObservedDomains {
    /// Returns the DomainMappings of a namespace that have this host, sorted by age and then by UID and name.
    pub fn mappings_of_host(
        &self,
        namespace: &str,
        host: &str,
    ) -> Vec<(&NamespacedName, &DomainMappingState)> {
        let names = self.mappings_by_host.get(host).into_iter().flatten();
        let own = names.filter(|it| it.namespace == namespace);
        let mut all: Vec<_> = own.filter_map(|it| self.mappings.get_key_value(it)).collect();
        all.sort_by_key(|(name, it)| (it.meta.created, it.meta.uid, *name));
        all
    }

    /// Returns the DomainMapping whose `spec.tls` all mappings of the host have: the oldest one that has it. The path is
    /// not known during a handshake.
    pub fn certificate_lead(
        &self,
        namespace: &str,
        host: &str,
    ) -> Option<(&NamespacedName, &DomainMappingState)> {
        let all = self.mappings_of_host(namespace, host);
        all.into_iter().find(|(_, it)| it.tls_secret.is_some())
    }

    /// Returns true if a namespace that may use a host or wildcard has a DomainMapping for it, in force or not. Without
    /// the claim, any namespace could take a host from another object.
    pub fn is_reserved_host(&self, host: &str) -> bool {
        let claim = self.claims.get(claim_name(host));
        let mappings = self.mappings_by_host.get(host);
        let is_claimed = |(claim, mappings): (&DomainClaimState, &BTreeSet<NamespacedName>)| {
            mappings.iter().any(|it| claim.namespace == *it.namespace)
        };
        claim.zip(mappings).is_some_and(is_claimed)
    }

    /// Returns the path rule of a mapping. `None`: it has the host for itself, which has no wildcard.
    ///
    /// Also a mapping of all paths has a rule if another mapping of the host has a prefix. Without a rule, an activator
    /// of an earlier release would serve the whole host by it.
    pub fn path_rule(&self, namespace: &str, domain: &DomainSpec) -> Option<PathRule> {
        let mut all = self.mappings_of_host(namespace, &domain.host).into_iter();
        let is_ruled = wildcard_suffix(&domain.host).is_some()
            || all.any(|(_, it)| it.domain.prefix != PathPrefix::ALL);
        is_ruled.then(|| PathRule {
            prefix: domain.prefix.clone(),
            strips_prefix: domain.strips_prefix,
        })
    }
}

/// Host and paths of a DomainMapping.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DomainSpec {
    /// Host in lower case; with a wildcard as `*.example.com`.
    pub host: Box<str>,
    /// Paths that the mapping serves.
    pub prefix: PathPrefix,
    /// True if pods receive the path without the prefix.
    pub strips_prefix: bool,
    /// Reason for which the annotations cannot be followed. The mapping serves nothing then.
    pub fault: Option<Box<str>>,
}

/// Fault of an annotation about the host or the paths of a DomainMapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainAnnotationFault {
    /// Key of the annotation.
    pub key: &'static str,
    /// Value of the annotation.
    pub value: String,
    /// Rule that the value breaks.
    pub rule: String,
}

impl DomainSpec {
    /// Reads host and paths of the mapping with this name from the values of its annotations `rouse.dev/host`,
    /// `rouse.dev/path-prefix` and `rouse.dev/strip-prefix`.
    pub fn from_annotations(
        name: &str,
        host: Option<&str>,
        prefix: Option<&str>,
        strip: Option<&str>,
    ) -> Self {
        let faults = Self::annotation_faults(host, prefix, strip);
        let text =
            |it: &DomainAnnotationFault| format!("{} is {:?}: {}", it.key, it.value, it.rule);
        let prefix = prefix.and_then(|it| PathPrefix::parse(it).ok());
        Self {
            host: host.unwrap_or(name).to_ascii_lowercase().into(),
            prefix: prefix.unwrap_or_default(),
            strips_prefix: strip == Some("true"),
            // A condition has room for one reason; the webhook has shown all of them.
            fault: faults.first().map(|it| text(it).into()),
        }
    }

    /// Returns the faults of the annotations.
    pub fn annotation_faults(
        host: Option<&str>,
        prefix: Option<&str>,
        strip: Option<&str>,
    ) -> Vec<DomainAnnotationFault> {
        let fault = |key, value: &str, rule: String| DomainAnnotationFault {
            key,
            value: value.to_owned(),
            rule,
        };
        // All faults are collected, so that a user can mend them at once.
        let mut faults = Vec::new();
        if let Some(host) = host.filter(|it| !is_host_pattern(it)) {
            let rule =
                "it must be a host of two labels or more in lower case, or such a host behind *.";
            faults.push(fault(key::HOST, host, rule.to_owned()));
        }
        let parsed = prefix.map(|text| (text, PathPrefix::parse(text)));
        if let Some((text, Err(error))) = &parsed {
            faults.push(fault(key::PATH_PREFIX, text, error.to_string()));
        }
        let has_prefix = matches!(&parsed, Some((_, Ok(it))) if *it != PathPrefix::ALL);
        match strip {
            None | Some("false") => {}
            Some("true") if has_prefix => {}
            Some(text @ "true") => {
                let rule = format!("it needs {} with a prefix other than /", key::PATH_PREFIX);
                faults.push(fault(key::STRIP_PREFIX, text, rule));
            }
            Some(text) => {
                faults.push(fault(key::STRIP_PREFIX, text, "use true or false".to_owned()));
            }
        }
        faults
    }

    /// Name of the ClusterDomainClaim for the host. A wildcard needs the claim of the domain below which it is, since
    /// no object has a name with `*`.
    pub fn claim_name(&self) -> &str {
        claim_name(&self.host)
    }

    /// Host and prefix as one name, which one DomainMapping can have.
    pub fn rule_name(&self) -> String {
        format!("{}{}", self.host, self.prefix)
    }

    /// URL of the host and its prefix.
    pub fn url(&self, scheme: &str) -> String {
        format!("{scheme}://{}{}", self.host, self.prefix.as_str())
    }
}

fn claim_name(host: &str) -> &str {
    wildcard_suffix(host).map_or(host, |suffix| &suffix[1..])
}

/// Returns true for a host of at least two labels, or such a host below a wildcard.
fn is_host_pattern(text: &str) -> bool {
    let host = wildcard_suffix(text).map_or(text, |suffix| &suffix[1..]);
    host.contains('.') && is_dns_subdomain(host)
}

/// DomainMapping, with the Secrets that its host has.
#[derive(Clone, Debug, PartialEq)]
pub struct DomainMappingState {
    /// Metadata of the DomainMapping object.
    pub meta: ObjectMetaSummary,
    /// Annotations of the DomainMapping, which its requested certificate inherits.
    pub annotations: CompactStringMap,
    /// Resource that the mapping refers to, as the API calls it: `services.serving.knative.dev`.
    pub target_resource: Box<str>,
    /// Name of the object that the mapping refers to.
    pub target: NamespacedName,
    /// Host and paths of the mapping.
    pub domain: DomainSpec,
    /// Name of the Secret with the user's certificate.
    pub tls_secret: Option<Box<str>>,
    /// Name of the Secret whose certificate the domain has: `tls_secret`, or the one before while that has a better one.
    pub served_secret: Option<Box<str>>,
    /// Demand of the annotations for certificates of clients; `None`: clients need none.
    pub client_auth: Option<ClientAuthSpec>,
    /// Name of the Secret whose authorities the domain has: the named one, or the one before while the named one has
    /// none. `None`: there is neither.
    pub served_client_ca: Option<Box<str>>,
    /// `Strict-Transport-Security` of the domain, where the object sets it.
    pub hsts: Option<HstsPolicy>,
    /// True if TLS of the domain is passed through to a service of raw TCP.
    pub passes_tls: bool,
    /// Handling of external plain HTTP, where the object sets it.
    pub http_protocol: Option<Box<str>>,
    /// Conditions of the DomainMapping's status.
    pub conditions: ConditionSet,
    /// True once the DomainMapping is being deleted.
    pub is_terminating: bool,
}

/// A ClusterDomainClaim, which reserves a domain for one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainClaimState {
    /// Namespace that may use the domain.
    pub namespace: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_the_name_unless_an_annotation_states_another() {
        let spec = |host, prefix, strip| {
            DomainSpec::from_annotations("www.example.com", host, prefix, strip)
        };
        let plain = spec(None, None, None);
        assert_eq!((&*plain.host, plain.claim_name()), ("www.example.com", "www.example.com"));
        assert_eq!((plain.rule_name(), plain.fault.as_deref()), ("www.example.com/".into(), None));
        let wild = spec(Some("*.example.com"), Some("/v1/"), Some("true"));
        assert_eq!((&*wild.host, wild.claim_name()), ("*.example.com", "example.com"));
        assert_eq!((wild.rule_name(), wild.strips_prefix), ("*.example.com/v1".into(), true));
        assert_eq!(wild.url("https"), "https://*.example.com/v1");
        assert_eq!(wild.fault, None);
    }

    #[test]
    fn annotations_that_cannot_be_followed_have_a_fault() {
        for (host, prefix, strip, key) in [
            (Some("*"), None, None, key::HOST),
            (Some("*.com"), None, None, key::HOST),
            (Some("a.*.com"), None, None, key::HOST),
            (Some("A.example.com"), None, None, key::HOST),
            (Some("a.example.com."), None, None, key::HOST),
            (None, Some("a"), None, key::PATH_PREFIX),
            (None, Some("/a;b"), None, key::PATH_PREFIX),
            (None, None, Some("true"), key::STRIP_PREFIX),
            (None, Some("/"), Some("true"), key::STRIP_PREFIX),
            (None, Some("/a"), Some("yes"), key::STRIP_PREFIX),
        ] {
            let faults = DomainSpec::annotation_faults(host, prefix, strip);
            let keys: Vec<&str> = faults.iter().map(|it| it.key).collect();
            assert_eq!(keys, [key], "{host:?} {prefix:?} {strip:?}");
            let spec = DomainSpec::from_annotations("a.b", host, prefix, strip);
            assert!(spec.fault.is_some_and(|it| it.starts_with(key)));
        }
    }
}
