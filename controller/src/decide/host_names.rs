//! Pure: host names and URLs of a Route (knative/serving `pkg/reconciler/route/domains`, `…/visibility` and
//! `…/config/domain.go` at 98e5ef9).
//!
//! ```text
//! tag ──tag-template──▶ public name ──domain-template, config-domain──▶ public host
//! tag ──TAG-ROUTE─────▶ placeholder ──namespace, cluster domain───────▶ private hosts
//! ```
//!
//! In Knative the placeholder has the name that `tag-template` yields. Here its name never changes, so a change of the
//! template renames no Service and withdraws no address.

use std::collections::BTreeMap;

use common::wire::{is_dns_label, is_dns_subdomain};

use crate::model::{
    config_maps::{
        DomainConfig, NetworkConfig,
        network::{domain_values, tag_values},
    },
    knative::key,
    object::names::tagged_name,
};

/// Settings from which host names follow.
#[derive(Clone, Copy, Debug)]
pub struct HostNameRules<'a> {
    /// Templates and scheme, from `config-network`.
    pub network: &'a NetworkConfig,
    /// Domains by label, from `config-domain`.
    pub domain: &'a DomainConfig,
    /// Domain of Routes for which `config-domain` has none; empty: they are private, as in Knative.
    pub default_domain: &'a str,
    /// Domain of names inside the cluster, such as `cluster.local`.
    pub cluster_domain: &'a str,
    /// Scheme of URLs with names inside the cluster: `http` or `https`.
    pub private_scheme: &'a str,
}

/// A Route, as far as its host names depend on it.
#[derive(Clone, Copy, Debug)]
pub struct RouteHostInputs<'a> {
    /// Name of the Route, without its namespace.
    pub name: &'a str,
    /// Namespace of the Route.
    pub namespace: &'a str,
    /// Labels of the Route: they choose the domain, and may make it private.
    pub labels: &'a BTreeMap<String, String>,
    /// Annotations of the Route, which a domain template may use.
    pub annotations: &'a BTreeMap<String, String>,
}

/// One name of a Route: its own, or that of a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteHost {
    /// Tag of the target; `None`: the Route itself.
    pub tag: Option<String>,
    /// Name of the placeholder, without its namespace.
    pub placeholder_name: String,
    /// True if the name is private: reachable only from inside the cluster, which Knative calls `cluster-local`.
    pub is_private: bool,
    /// Host of its URL: the public one, or the longest private one.
    pub host: String,
    /// URL of the name in statuses.
    pub url: String,
}

/// Reason for which a name cannot be given, as shown in the Route's conditions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostNameError {
    /// A template of `config-network` fails with the Route's values.
    #[error("domain name error: error executing the {which}: {why}")]
    Template {
        /// Name of the template: `DomainTemplate` or `TagTemplate`.
        which: &'static str,
        /// Error of the template's execution.
        why: String,
    },
    /// The domain template yields no valid domain name.
    #[error(
        "domain name error: invalid domain name {host:?}: use lower-case letters, digits, '-' and '.', with at least \
         two parts of at most 63 characters (see domain-template in config-network)"
    )]
    Host {
        /// Text that the template yields.
        host: String,
    },
    /// The tag template yields no valid name of a Service.
    #[error(
        "domain name error: invalid service name {name:?} for tag {tag:?}: use at most 63 lower-case letters, digits \
         and '-' (see tag-template in config-network)"
    )]
    Service {
        /// Text that the template yields.
        name: String,
        /// Tag of the target.
        tag: String,
    },
}

impl HostNameRules<'_> {
    /// Returns the name of a Route, or of one of its tags. `is_private_placeholder` returns true for placeholders whose
    /// own label makes them private.
    pub fn route_host(
        &self,
        route: &RouteHostInputs<'_>,
        tag: Option<&str>,
        is_private_placeholder: impl Fn(&str) -> bool,
    ) -> Result<RouteHost, HostNameError> {
        let public_name = self.public_name(route.name, tag)?;
        let placeholder_name = tagged_name(tag.filter(|tag| !tag.is_empty()), route.name);
        let is_private = self.is_private(route) || is_private_placeholder(&placeholder_name);
        let host = if is_private {
            self.private_host(&placeholder_name, route.namespace)
        } else {
            self.public_host(route, &public_name)?
        };
        let url = format!("{}://{host}", self.url_scheme(is_private));
        Ok(RouteHost { tag: tag.map(str::to_owned), placeholder_name, is_private, host, url })
    }

    /// Returns the name from which the domain template makes the public host of a Route, or of one of its tags.
    fn public_name(&self, route: &str, tag: Option<&str>) -> Result<String, HostNameError> {
        let Some(tag) = tag.filter(|tag| !tag.is_empty()) else { return Ok(route.to_owned()) };
        let name = match &self.network.tag_template {
            None => tagged_name(Some(tag), route),
            Some(template) => template
                .render(&tag_values(route, tag))
                .map_err(|error| HostNameError::Template { which: "TagTemplate", why: error })?,
        };
        // Only a label can be the name of a Service, and templates may yield any text.
        if is_dns_label(&name) {
            Ok(name)
        } else {
            Err(HostNameError::Service { name, tag: tag.to_owned() })
        }
    }

    /// Returns true if the whole Route is private: by its label, or because no public domain matches it.
    fn is_private(&self, route: &RouteHostInputs<'_>) -> bool {
        has_cluster_local_label(route.labels) || self.matching_domain(route).is_none()
    }

    /// Returns the host that stands for all names of Routes without labels in a namespace, `*.` and a domain, with the
    /// domain of `config-domain`. `None`: these Routes are private, or their names differ in more than the first label.
    pub fn wildcard_host(&self, namespace: &str) -> Option<(String, &str)> {
        let none = BTreeMap::new();
        let route = RouteHostInputs { name: "*", namespace, labels: &none, annotations: &none };
        let domain = self.matching_domain(&route)?;
        let host = self.render_host(&route, "*").ok()?;
        let below = host.strip_prefix("*.").filter(|it| it.contains('.') && is_dns_subdomain(it));
        below.is_some().then_some((host, domain))
    }

    /// Returns the public domain that matches a Route; `None`: it is private.
    pub fn matching_domain(&self, route: &RouteHostInputs<'_>) -> Option<&str> {
        // A domain `svc.<cluster domain>` in `config-domain` makes its Routes private, as in Knative.
        let inside = |it: &str| it.strip_prefix("svc.") == Some(self.cluster_domain);
        let default = Some(self.default_domain).filter(|it| !it.is_empty());
        self.domain.domain_for(route.labels).or(default).filter(|it| !inside(it))
    }

    /// Returns the public host of a name, by the domain template.
    fn public_host(
        &self,
        route: &RouteHostInputs<'_>,
        name: &str,
    ) -> Result<String, HostNameError> {
        let host = self.render_host(route, name)?;
        // A single label is no name in public DNS.
        if host.contains('.') && is_dns_subdomain(&host) {
            Ok(host)
        } else {
            Err(HostNameError::Host { host })
        }
    }

    /// Returns what the domain template makes of a name, valid as a host or not.
    fn render_host(
        &self,
        route: &RouteHostInputs<'_>,
        name: &str,
    ) -> Result<String, HostNameError> {
        let domain = self.matching_domain(route).unwrap_or_default();
        let Some(template) = &self.network.domain_template else {
            return Ok(format!("{name}.{}.{domain}", route.namespace));
        };
        let (annotations, labels) = (pairs(route.annotations), pairs(route.labels));
        let values = domain_values(name, route.namespace, domain, annotations, labels);
        template
            .render(&values)
            .map_err(|error| HostNameError::Template { which: "DomainTemplate", why: error })
    }

    /// Returns the longest private host of a placeholder; private names never follow the user's template.
    fn private_host(&self, name: &str, namespace: &str) -> String {
        format!("{name}.{namespace}.svc.{}", self.cluster_domain)
    }

    /// Returns the scheme of a URL. That of private names never follows the public ones.
    fn url_scheme(&self, is_private: bool) -> &str {
        if is_private { self.private_scheme } else { &self.network.external_scheme }
    }
}

/// Returns true if the labels of a Route make it private.
fn has_cluster_local_label(labels: &BTreeMap<String, String>) -> bool {
    labels.get(key::VISIBILITY).is_some_and(|it| it == "cluster-local")
}

fn pairs(map: &BTreeMap<String, String>) -> impl Iterator<Item = (&str, &str)> {
    map.iter().map(|(key, text)| (key.as_str(), text.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config_maps::{ConfigMapSettings, read};

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect()
    }

    fn config<T: ConfigMapSettings>(pairs: &[(&str, &str)]) -> T {
        read(&map(pairs)).unwrap().value
    }

    struct HostNameCase {
        network: NetworkConfig,
        domain: DomainConfig,
        labels: BTreeMap<String, String>,
        annotations: BTreeMap<String, String>,
    }

    impl HostNameCase {
        fn new(network: &[(&str, &str)], domain: &[(&str, &str)], labels: &[(&str, &str)]) -> Self {
            Self {
                network: config(network),
                domain: config(domain),
                labels: map(labels),
                annotations: map(&[("sub", "www")]),
            }
        }

        /// Returns the name of the Route or tag, while the placeholder of the name `private` is private.
        fn route_host(&self, tag: Option<&str>, private: &str) -> Result<RouteHost, HostNameError> {
            let (labels, annotations) = (&self.labels, &self.annotations);
            let route = RouteHostInputs { name: "shop", namespace: "team", labels, annotations };
            self.rules().route_host(&route, tag, |name| name == private)
        }

        fn rules(&self) -> HostNameRules<'_> {
            let (network, domain) = (&self.network, &self.domain);
            HostNameRules {
                network,
                domain,
                default_domain: "",
                cluster_domain: "c1.local",
                private_scheme: "http",
            }
        }

        fn url(&self, tag: Option<&str>) -> String {
            self.route_host(tag, "").map_or_else(|it| it.to_string(), |it| it.url)
        }
    }

    const PUBLIC: &[(&str, &str)] = &[("example.com", "")];

    #[test]
    fn names_follow_their_templates() {
        for (network, tag, url) in [
            (&[][..], None, "http://shop.team.example.com"),
            (&[], Some("v1"), "http://v1-shop.team.example.com"),
            (&[("default-external-scheme", "https")], None, "https://shop.team.example.com"),
            (&[("domain-template", "{{.Name}}.{{.Domain}}")], None, "http://shop.example.com"),
            (
                &[("domain-template", "{{.Name}}-{{.Namespace}}.{{.Domain}}")],
                Some("v1"),
                "http://v1-shop-team.example.com",
            ),
            (
                &[("tag-template", "{{.Name}}--{{.Tag}}")],
                Some("v1"),
                "http://shop--v1.team.example.com",
            ),
            (
                &[("domain-template", "{{or (index .Annotations \"sub\") .Name}}.{{.Domain}}")],
                None,
                "http://www.example.com",
            ),
        ] {
            assert_eq!(HostNameCase::new(network, PUBLIC, &[]).url(tag), url, "{network:?}");
        }
    }

    #[test]
    fn labels_choose_the_domain_and_may_hide_everything() {
        let domains = &[("example.com", ""), ("prod.com", "selector:\n  app: prod\n")];
        let config = &[("domain-template", "{{.Name}}.{{.Domain}}")];
        let inside = "http://shop.team.svc.c1.local";
        let label = ("networking.knative.dev/visibility", "cluster-local");
        for (domains, labels, url) in [
            (&domains[..], &[][..], "http://shop.example.com"),
            (domains, &[("app", "prod")], "http://shop.prod.com"),
            (domains, &[("app", "prod"), label], inside),
            (&domains[1..], &[], inside),
            (&[], &[], inside),
            (&[("svc.c1.local", "")], &[], inside),
        ] {
            assert_eq!(
                HostNameCase::new(config, domains, labels).url(None),
                url,
                "{domains:?} {labels:?}"
            );
        }
    }

    #[test]
    fn the_default_domain_is_for_routes_that_no_other_domain_matches() {
        let case = HostNameCase::new(&[], &[("prod.com", "selector:\n  app: prod\n")], &[]);
        let names = HostNameRules { default_domain: "localhost", ..case.rules() };
        let (labels, prod) = (map(&[]), map(&[("app", "prod")]));
        let hidden = map(&[("networking.knative.dev/visibility", "cluster-local")]);
        let url = |labels| {
            let annotations = &case.annotations;
            let route = RouteHostInputs { name: "shop", namespace: "team", labels, annotations };
            names.route_host(&route, None, |_| false).unwrap().url
        };
        assert_eq!(url(&labels), "http://shop.team.localhost");
        assert_eq!(url(&prod), "http://shop.team.prod.com");
        assert_eq!(url(&hidden), "http://shop.team.svc.c1.local");
    }

    #[test]
    fn a_tag_template_changes_the_public_host_and_no_placeholder() {
        let network = &[("tag-template", "{{.Name}}-{{.Tag}}")][..];
        let case = HostNameCase::new(network, PUBLIC, &[]);
        let public = case.route_host(Some("v1"), "none").unwrap();
        assert_eq!(
            (&*public.host, &*public.placeholder_name),
            ("shop-v1.team.example.com", "v1-shop")
        );
        // The label is on the placeholder, and the URL of the private tag names it.
        let private = case.route_host(Some("v1"), "v1-shop").unwrap();
        assert_eq!((private.is_private, &*private.url), (true, "http://v1-shop.team.svc.c1.local"));
    }

    #[test]
    fn a_label_on_the_placeholder_hides_one_tag() {
        let case = HostNameCase::new(&[("default-external-scheme", "https")], PUBLIC, &[]);
        let tag = case.route_host(Some("v1"), "v1-shop").unwrap();
        let expected = RouteHost {
            tag: Some("v1".into()),
            placeholder_name: "v1-shop".into(),
            is_private: true,
            host: "v1-shop.team.svc.c1.local".into(),
            url: "http://v1-shop.team.svc.c1.local".into(),
        };
        assert_eq!(tag, expected);
        let host = case.route_host(None, "v1-shop").unwrap();
        assert!(!host.is_private);
    }

    #[test]
    fn only_private_names_follow_the_scheme_inside_the_cluster() {
        let case = HostNameCase::new(&[], PUBLIC, &[]);
        let names = HostNameRules { private_scheme: "https", ..case.rules() };
        let (labels, annotations) = (&case.labels, &case.annotations);
        let route = RouteHostInputs { name: "shop", namespace: "team", labels, annotations };
        let url = |tag| names.route_host(&route, tag, |name| name == "v1-shop").unwrap().url;
        assert_eq!(url(None), "http://shop.team.example.com");
        assert_eq!(url(Some("v1")), "https://v1-shop.team.svc.c1.local");
    }

    #[test]
    fn an_invalid_name_is_refused_with_the_setting_to_change() {
        let one = HostNameCase::new(&[("domain-template", "{{.Name}}")], PUBLIC, &[]);
        assert_eq!(one.route_host(None, ""), Err(HostNameError::Host { host: "shop".into() }));
        let upper = &[("domain-template", "{{index .Labels \"zone\"}}x.{{.Domain}}")];
        let upper = HostNameCase::new(upper, PUBLIC, &[("zone", "EU")]);
        let expected = HostNameError::Host { host: "EUx.example.com".into() };
        assert_eq!(upper.route_host(None, ""), Err(expected));
        let long = "t".repeat(60);
        let written = &[("tag-template", "{{.Tag}}-{{.Name}}")];
        let error =
            HostNameCase::new(written, PUBLIC, &[]).route_host(Some(&long), "").unwrap_err();
        let name = format!("{long}-shop");
        assert_eq!(error, HostNameError::Service { name, tag: long });
        assert!(error.to_string().contains("see tag-template in config-network"));
    }
}
