//! Pure: Kubernetes' rules for texts and quantities in the fields of a pod.

use std::net::IpAddr;

use serde_json::Value;

use crate::read::parse::{dns_names, metadata};

/// Accepts an address, but no IPv4 address that is written as one of IPv6.
pub(super) fn is_address(text: &str) -> bool {
    match text.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) => address.to_ipv4_mapped().is_none(),
        address => address.is_ok(),
    }
}

pub(super) fn is_subdomain(text: &str) -> bool {
    dns_names::subdomain_errors(text).is_empty()
}

pub(super) fn is_qualified_name(text: &str) -> bool {
    dns_names::qualified_name_errors(text).is_empty()
}

/// Accepts any text that is present.
pub(super) fn is_any(_text: &str) -> bool {
    true
}

/// Accepts a DNS-1123 label: a name without dots.
pub(super) fn is_label(text: &str) -> bool {
    dns_names::dns1123_errors(text).is_empty()
}

pub(super) fn is_label_value(text: &str) -> bool {
    !text.contains('/') && is_qualified_name(text)
}

/// Accepts a search domain: the root, or one that may have underscores and a final dot.
pub(super) fn is_search_domain(text: &str) -> bool {
    // Resolvers accept underscores, which labels of host names may not contain.
    let text = text.replace('_', "a");
    text == "." || is_subdomain(text.strip_suffix('.').unwrap_or(&text))
}

/// Accepts a field of a pod that variables of its containers may refer to.
pub(super) fn is_field_of_variable(text: &str) -> bool {
    const FIELDS: [&str; 9] = [
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "spec.nodeName",
        "spec.serviceAccountName",
        "status.hostIP",
        "status.hostIPs",
        "status.podIP",
        "status.podIPs",
    ];
    FIELDS.contains(&text) || is_metadata_entry(text)
}

/// Accepts a field of a pod that files of its volumes may refer to.
pub(super) fn is_field_of_file(text: &str) -> bool {
    const FIELDS: [&str; 5] = [
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "metadata.labels",
        "metadata.annotations",
    ];
    FIELDS.contains(&text) || is_metadata_entry(text)
}

/// Returns true for one label or annotation, as in `metadata.labels['app']`.
fn is_metadata_entry(text: &str) -> bool {
    let key = |field: &str| text.strip_prefix(field)?.strip_prefix("['")?.strip_suffix("']");
    key("metadata.labels").is_some_and(is_qualified_name)
        // The domain of an annotation's key may have capitals (Kubernetes' `ValidateAnnotations`).
        || key("metadata.annotations").is_some_and(|it| is_qualified_name(&it.to_ascii_lowercase()))
}

/// Accepts a container's limit or request that variables may refer to.
pub(super) fn is_resource_of_container(text: &str) -> bool {
    let named = text.strip_prefix("limits.").or_else(|| text.strip_prefix("requests."));
    named.is_some_and(is_standard_resource)
}

/// Accepts a resource that every container may request.
pub(super) fn is_standard_resource(text: &str) -> bool {
    ["cpu", "memory", "ephemeral-storage"].contains(&text) || text.starts_with("hugepages-")
}

/// Accepts a divisor of quantities: exactly one unit, such as `1`, `1m` or `1Mi`, or 0.
pub(super) fn is_divisor(text: &str) -> bool {
    let Some(value) = quantity_value(&text.into()).filter(|_| metadata::is_quantity(text)) else {
        return false;
    };
    // Kubernetes keeps powers of ten that are written as such, and takes them for no unit.
    let has_exponent = text.trim_end_matches(['E', 'i']).contains(['e', 'E']);
    let base: f64 = if text.ends_with('i') { 1024.0 } else { 1000.0 };
    let is_unit = (-1..=6).any(|power| value == base.powi(power));
    value == 0.0 || is_unit && !has_exponent
}

pub(super) fn is_positive_quantity(text: &str) -> bool {
    metadata::is_quantity(text) && quantity_value(&text.into()).is_some_and(|it| it > 0.0)
}

/// Accepts a path without a step to the parent folder.
pub(super) fn has_no_parent_step(text: &str) -> bool {
    text.split('/').all(|it| it != "..")
}

/// Accepts a key of a ConfigMap or Secret.
pub(super) fn is_config_key(text: &str) -> bool {
    let fits = |it: u8| it.is_ascii_alphanumeric() || matches!(it, b'-' | b'_' | b'.');
    text.len() <= 253 && text.bytes().all(fits) && text != "." && !text.starts_with("..")
}

/// Accepts the name of a variable: printable ASCII except `=`, which ends a name.
pub(super) fn is_env_name(text: &str) -> bool {
    text.bytes().all(|it| (b' '..=b'~').contains(&it) && it != b'=')
}

pub(super) fn is_header_name(text: &str) -> bool {
    text.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'-')
}

/// Accepts a relative path that stays below its start.
pub(super) fn is_inner_path(text: &str) -> bool {
    !text.starts_with('/') && has_no_parent_step(text)
}

/// Accepts the path of a file in a volume: the kubelet keeps names that begin with two dots for itself.
pub(super) fn is_file_path(text: &str) -> bool {
    is_inner_path(text) && !text.starts_with("..")
}

/// Accepts the name of a CSI driver, in letters of any case.
pub(super) fn is_driver_name(text: &str) -> bool {
    text.len() <= 63 && is_subdomain(&text.to_ascii_lowercase())
}

/// Accepts the name of a port, by the rules for service names (RFC 6335).
pub(super) fn is_port_name(text: &str) -> bool {
    let fits = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-';
    let edge = |it: Option<char>| it.is_some_and(|it| it != '-');
    text.len() <= 15
        && text.bytes().all(fits)
        && text.bytes().any(|it| it.is_ascii_lowercase())
        && edge(text.chars().next())
        && edge(text.chars().last())
        && !text.contains("--")
}

/// Parses a quantity into a number, exact enough for comparisons.
pub(super) fn quantity_value(value: &Value) -> Option<f64> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    // The sign belongs to the number here; negative quantities are refused elsewhere.
    let end = text.find(|it: char| !it.is_ascii_digit() && !"+-.".contains(it));
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let scale = match unit {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1_048_576.0,
        "Gi" => 1_073_741_824.0,
        "Ti" => 1_099_511_627_776.0,
        "Pi" => 1_125_899_906_842_624.0,
        "Ei" => 1_152_921_504_606_846_976.0,
        // Not a unit but an exponent, as in `1e3`.
        _ => return text.parse().ok(),
    };
    number.parse::<f64>().ok().map(|it| it * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rule of text, with samples that it accepts and samples that it refuses.
    type TextRuleSamples = (fn(&str) -> bool, &'static [&'static str], &'static [&'static str]);

    /// Samples for the rules that are functions: accepted and refused texts.
    const TEXT_RULE_SAMPLES: &[TextRuleSamples] = &[
        (is_address, &["10.0.0.1", "::1"], &["10.0.0", "host", "::ffff:1.2.3.4"]),
        (is_subdomain, &["a", "a.b-c"], &["A", "a_b", "-a", "a..b"]),
        (is_qualified_name, &["a", "x.io/A_b"], &["/a", "a b", "-"]),
        (is_config_key, &["a", "a.b", ".a"], &["..", "..a", "a/b", "."]),
        (is_env_name, &["A", "a b", "1"], &["a=b", "a\n", "ä"]),
        (is_header_name, &["X-A"], &["X A", "X_A", "a:"]),
        (is_inner_path, &["a", "a/b", "..a"], &["/a", "../a", "a/.."]),
        (is_file_path, &["a", "a/b", "a/..b"], &["/a", "../a", "a/..", "..a"]),
        (is_driver_name, &["a.b", "A.b"], &["a_b", "a..b"]),
        (is_label, &["a", "a-1"], &["A", "a.b", "-a"]),
        (is_label_value, &["a", "A_b"], &["a/b", "a b", "-"]),
        (is_search_domain, &["a.b", "a.b.", ".", "_a.b"], &["A", "a b", "a..b"]),
        (
            is_field_of_variable,
            &["metadata.name", "status.podIPs", "metadata.labels['a/B']"],
            &["metadata", "METADATA.NAME", "metadata.labels", "metadata.labels[a]"],
        ),
        (
            is_field_of_file,
            &["metadata.name", "metadata.labels", "metadata.annotations['A/b']"],
            &["spec.nodeName", "status.podIP", "metadata.labels['A/b']", "metadata.labels['']"],
        ),
        (is_resource_of_container, &["limits.cpu", "requests.hugepages-2Mi"], &["cpu", "limits.x"]),
        (
            is_divisor,
            &["1", "1m", "1000m", "1E", "1Ei", "0", "0m"],
            &["2", "m", "1x", "-1", "1e3", "1024"],
        ),
        (is_positive_quantity, &["1Gi", "100"], &["0", "-1", "a"]),
        (has_no_parent_step, &["/a", "a..b"], &["../a", "/a/.."]),
        (is_port_name, &["http", "a-1"], &["a--b", "1", "-a", "abcdefghijklmnop"]),
    ];

    #[test]
    fn names_and_paths_are_checked_as_in_kubernetes() {
        for (fits, valid, invalid) in TEXT_RULE_SAMPLES {
            for text in *valid {
                assert!(fits(text), "{text:?}");
            }
            for text in *invalid {
                assert!(!fits(text), "{text:?}");
            }
        }
    }
}
