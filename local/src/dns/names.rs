//! Pure: addresses of the DNS names inside the node.

use std::{collections::BTreeMap, net::IpAddr};

use common::wire::NamespacedName;

/// DNS domain of all names inside the node, as in a Kubernetes cluster.
pub const DOMAIN: &str = "cluster.local";

/// Addresses of each service, by namespace and name.
pub type DnsNames = BTreeMap<NamespacedName, Vec<IpAddr>>;

/// Result of the look-up of a DNS name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DnsLookup<'a> {
    /// The name of a service, with its addresses.
    Addresses(&'a [IpAddr]),
    /// A name that only has names below it, such as that of a namespace.
    EmptyNonTerminal,
    /// No such name. The node has no upstream resolver, so this holds for every name elsewhere too.
    NxDomain,
}

/// Looks up a fully qualified name, in any case, with or without the final dot.
pub fn lookup_name<'a>(names: &'a DnsNames, question: &str) -> DnsLookup<'a> {
    let question = question.trim_end_matches('.').to_ascii_lowercase();
    // A name with names below it exists, though it has no address (RFC 8020).
    if question == DOMAIN {
        return DnsLookup::EmptyNonTerminal;
    }
    let Some(inside) = question.strip_suffix(DOMAIN).and_then(|rest| rest.strip_suffix('.')) else {
        // Outside of the domain of the cluster.
        return DnsLookup::NxDomain;
    };
    let labels: Vec<&str> = inside.split('.').collect();
    match labels[..] {
        ["svc"] => DnsLookup::EmptyNonTerminal,
        [namespace, "svc"] if has_namespace(names, namespace) => DnsLookup::EmptyNonTerminal,
        [name, namespace, "svc"] => {
            let addresses = names.get(&NamespacedName::new(namespace, name));
            addresses.map_or(DnsLookup::NxDomain, |addresses| DnsLookup::Addresses(addresses))
        }
        _ => DnsLookup::NxDomain,
    }
}

fn has_namespace(names: &DnsNames, namespace: &str) -> bool {
    // Names sort by namespace first, so the first one from an empty name on shows if the namespace has any.
    let first = names.range(NamespacedName::new(namespace, "")..).next();
    first.is_some_and(|(name, _)| name.namespace == namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> DnsNames {
        let address = |text: &str| text.parse().expect("an address");
        DnsNames::from([
            (
                NamespacedName::new("default", "hello"),
                vec![address("10.96.0.5"), address("fd00:10:96::5")],
            ),
            (NamespacedName::new("shop", "cart"), vec![address("10.96.0.6")]),
        ])
    }

    #[test]
    fn a_service_is_found_in_any_case_with_or_without_the_final_dot() {
        let names = names();
        for question in ["hello.default.svc.cluster.local", "Hello.Default.SVC.cluster.LOCAL."] {
            let result = lookup_name(&names, question);
            assert_eq!(
                result,
                DnsLookup::Addresses(&names[&NamespacedName::new("default", "hello")]),
                "{question}"
            );
        }
    }

    #[test]
    fn inner_names_exist_without_addresses() {
        let names = names();
        for question in ["cluster.local", "svc.cluster.local.", "shop.svc.cluster.local"] {
            assert_eq!(lookup_name(&names, question), DnsLookup::EmptyNonTerminal, "{question}");
        }
    }

    #[test]
    fn everything_else_is_nothing() {
        let names = names();
        let elsewhere = [
            "",
            ".",
            "hello",
            "hello.default",
            "example.com",
            "cart.default.svc.cluster.local",
            "none.svc.cluster.local",
            "x.hello.default.svc.cluster.local",
            "hello.default.svc.cluster.local.default.svc.cluster.local",
            "hello.default.svcXcluster.local",
            "svc.notcluster.local",
        ];
        for question in elsewhere {
            assert_eq!(lookup_name(&names, question), DnsLookup::NxDomain, "{question}");
        }
    }
}
