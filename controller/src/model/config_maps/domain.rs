//! Pure: `config-domain`: domains of the host names of Routes.
//!
//! Rules: knative/serving `pkg/reconciler/route/config/domain.go` at 98e5ef9.

use std::collections::BTreeMap;

use common::wire::is_dns_subdomain;
use serde::Deserialize;

use super::{
    ConfigMapSettings, deployment::best_selector_match, keys::ConfigMapReader,
    network::NO_DOMAIN_TYPE,
};

/// `config-domain`, checked: domains by name, each with the labels a route must have for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainConfig(BTreeMap<String, BTreeMap<String, String>>);

/// Value of one domain's key.
#[derive(Default, Deserialize)]
#[serde(default)]
struct DomainSelector {
    /// Labels that a Route must have; none: all Routes match.
    selector: BTreeMap<String, String>,
    /// `wildcard` where one certificate covers a namespace; it has no effect.
    r#type: String,
}

impl DomainConfig {
    /// Domain of a Route with these labels: the one whose selector has the most labels, then the first by name. `None`:
    /// no domain matches, and the names lie in `svc.` of the cluster's domain, which is not reachable from outside.
    pub fn domain_for(&self, labels: &BTreeMap<String, String>) -> Option<&str> {
        best_selector_match(self.0.iter().map(|(name, it)| (name.as_str(), it)), labels)
    }
}

impl ConfigMapSettings for DomainConfig {
    const NAME: &'static str = "config-domain";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        let mut domains = BTreeMap::new();
        // Collected first, since warnings are added to `keys` meanwhile.
        let all: Vec<_> = keys.all_keys().collect();
        for (domain, text) in all {
            // An empty value has no selector and matches all Routes.
            let choice = serde_norway::from_str::<Option<DomainSelector>>(text);
            match choice {
                Ok(choice) => {
                    let choice = choice.unwrap_or_default();
                    if !choice.r#type.is_empty() {
                        keys.add_warning(format!(
                            "type of {domain:?} has no effect: {NO_DOMAIN_TYPE}"
                        ));
                    }
                    domains.insert(domain.to_owned(), choice.selector);
                }
                Err(error) => keys.add_error(format!("failed to parse {domain:?}: {error}")),
            }
            // Knative accepts any key, so this is only a warning.
            if !is_dns_subdomain(domain) {
                keys.add_warning(format!(
                    "{domain:?} is no domain name: no route can stand below it"
                ));
            }
        }
        Self(domains)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config_maps::read;

    fn map(pairs: &[(&str, &str)]) -> DomainConfig {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        let read = read::<DomainConfig>(&data).unwrap();
        assert_eq!(read.warnings, [] as [String; 0]);
        read.value
    }

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect()
    }

    #[test]
    fn the_domain_with_the_most_labels_wins_and_the_first_of_equals() {
        let domains = map(&[
            ("default.com", ""),
            ("other-default.com", ""),
            ("prod.com", "selector:\n  app: prod\n"),
            ("gold.com", "selector:\n  app: prod\n  tier: gold\n"),
            ("_example", "anything: goes"),
        ]);
        for (pairs, expected) in [
            (&[][..], "default.com"),
            (&[("app", "test")], "default.com"),
            (&[("app", "prod")], "prod.com"),
            (&[("app", "prod"), ("tier", "gold")], "gold.com"),
        ] {
            assert_eq!(domains.domain_for(&labels(pairs)), Some(expected), "{pairs:?}");
        }
    }

    #[test]
    fn without_a_domain_for_all_some_routes_have_none() {
        let domains = map(&[("prod.com", "selector:\n  app: prod\n")]);
        assert_eq!(domains.domain_for(&labels(&[])), None);
        assert_eq!(DomainConfig::default().domain_for(&labels(&[("app", "prod")])), None);
    }

    #[test]
    fn a_value_that_is_no_selector_is_refused() {
        let data = [("a.com".to_owned(), "selector: 5".to_owned())].into();
        let error = read::<DomainConfig>(&data).unwrap_err();
        assert!(error[0].to_string().starts_with("failed to parse \"a.com\": "), "{error:?}");
    }
}
