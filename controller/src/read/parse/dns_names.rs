//! Pure: names that Kubernetes accepts, and the texts of its own checks (apimachinery `util/validation`).

/// Length limit of a DNS label.
const MAX_LABEL_BYTES: usize = 63;
/// Length limit of a name made of labels.
const MAX_SUBDOMAIN_BYTES: usize = 253;

/// Returns the rules of a DNS-1035 label that `text` breaks.
pub(crate) fn dns1035_errors(text: &str) -> Vec<String> {
    let fits = is_label(text) && text.starts_with(|it: char| it.is_ascii_lowercase());
    let rule = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic \
        character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation \
        is '[a-z]([-a-z0-9]*[a-z0-9])?')";
    rule_errors(text, MAX_LABEL_BYTES, fits, rule)
}

/// Returns the rules that a prefix of a DNS-1035 label breaks. A random suffix follows, so it may end in a dash.
pub(crate) fn dns1035_prefix_errors(text: &str) -> Vec<String> {
    match text.strip_suffix('-') {
        Some(head) if !head.is_empty() => dns1035_errors(&format!("{head}a")),
        _ => dns1035_errors(text),
    }
}

/// Returns the rules of a DNS-1123 label that `text` breaks.
pub(crate) fn dns1123_errors(text: &str) -> Vec<String> {
    let rule = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
        and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
        '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
    rule_errors(text, MAX_LABEL_BYTES, is_label(text), rule)
}

/// Returns the rules of a DNS-1123 subdomain that `text` breaks: labels joined by dots.
pub(crate) fn subdomain_errors(text: &str) -> Vec<String> {
    let rule = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and \
        must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
        '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
    rule_errors(text, MAX_SUBDOMAIN_BYTES, text.split('.').all(is_label), rule)
}

/// Returns the rules that a qualified name breaks: letters, digits, `-`, `_`, `.`, and a domain before a slash, if any.
pub(crate) fn qualified_name_errors(text: &str) -> Vec<String> {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    let edge = |it: Option<char>| it.is_some_and(|it| it.is_ascii_alphanumeric());
    let inner = |it: char| it.is_ascii_alphanumeric() || matches!(it, '-' | '_' | '.');
    let fits = edge(name.chars().next()) && edge(name.chars().last()) && name.chars().all(inner);
    let rule = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
        alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
        '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
    let mut out = match prefix.map(subdomain_errors) {
        // The errors of the prefix come first, as in Kubernetes.
        Some(all) => all.into_iter().map(|error| format!("prefix part {error}")).collect(),
        None => Vec::new(),
    };
    out.extend(rule_errors(name, MAX_LABEL_BYTES, fits, rule));
    out
}

/// Formats a list as Go prints one.
pub(crate) fn go_list(all: &[String]) -> String {
    format!("[{}]", all.join(" "))
}

fn rule_errors(text: &str, longest: usize, fits: bool, rule: &str) -> Vec<String> {
    let long = (text.len() > longest).then(|| format!("must be no more than {longest} characters"));
    // Excess length breaks one rule, wrong letters another: a name that is only too long is not reported twice.
    let shaped = fits || (text.len() > longest && has_label_form(text));
    long.into_iter().chain((!shaped).then(|| rule.to_owned())).collect()
}

fn is_label(text: &str) -> bool {
    text.len() <= MAX_LABEL_BYTES && has_label_form(text)
}

fn has_label_form(text: &str) -> bool {
    let edge =
        |it: Option<&u8>| it.is_some_and(|it| it.is_ascii_lowercase() || it.is_ascii_digit());
    let bytes = text.as_bytes();
    let inner = |it: &u8| it.is_ascii_lowercase() || it.is_ascii_digit() || *it == b'-';
    edge(bytes.first()) && edge(bytes.last()) && bytes.iter().all(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_judged_as_kubernetes_does() {
        assert!(dns1035_errors("hello").is_empty() && dns1123_errors("1a").is_empty());
        for invalid in ["", "1a", "Hello", "a-", "-a", "a.b", "ä"] {
            assert_eq!(dns1035_errors(invalid).len(), 1, "{invalid}");
        }
        assert_eq!(dns1035_errors(&"a".repeat(64)), ["must be no more than 63 characters"]);
        assert_eq!(dns1035_errors(&"A".repeat(64)).len(), 2);
        assert!(
            dns1035_prefix_errors("hello-").is_empty() && !dns1035_prefix_errors("-").is_empty()
        );
        assert!(!dns1035_prefix_errors("Ä-").is_empty());
        assert!(subdomain_errors("a.b-c.d1").is_empty() && !subdomain_errors("a..b").is_empty());
        assert!(
            qualified_name_errors("example.com/My_Name").is_empty()
                && !qualified_name_errors("a/").is_empty()
        );
    }
}
