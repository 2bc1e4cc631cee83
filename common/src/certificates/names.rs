//! Pure: hosts that a certificate is for.

/// Longest name of a host, in bytes (RFC 1035).
const MAX_HOST_BYTES: usize = 253;
/// Number of names that a summary shows.
const SUMMARY_NAMES: usize = 3;

/// DNS names of a certificate's subject alternative names, in lower case. A name may begin with the label `*`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateNames(Box<[Box<str>]>);

impl CertificateNames {
    /// Builds the names of a certificate. Names that no host has are left out, because logs and conditions show the
    /// others.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        let names = names.into_iter().filter(|name| is_printable_host(name));
        Self(names.map(|name| name.to_ascii_lowercase().into_boxed_str()).collect())
    }

    /// Returns all names, in the order of the certificate.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.iter().map(AsRef::as_ref)
    }

    /// Returns true if one of the names is the host. As for the other methods, the host is in lower case and has no
    /// final dot.
    pub fn has_exact(&self, host: &str) -> bool {
        self.0.iter().any(|name| **name == *host)
    }

    /// Returns true if a wildcard covers the host. It stands for one label: `*.a.b` covers `x.a.b`, but neither `a.b`
    /// nor `y.x.a.b`.
    pub fn has_wildcard_for(&self, host: &str) -> bool {
        let Some((label, parent)) = host.split_once('.') else { return false };
        let covers = |name: &str| name.strip_prefix("*.") == Some(parent);
        !label.is_empty() && !parent.is_empty() && self.0.iter().any(|name| covers(name))
    }

    /// Returns true if the certificate is for the host.
    pub fn covers(&self, host: &str) -> bool {
        self.has_exact(host) || self.has_wildcard_for(host)
    }

    /// Returns the first names and the number of the others, for messages: `a, b, c and 2 more`, or `no host`.
    pub fn summary(&self) -> String {
        if self.0.is_empty() {
            return "no host".to_owned();
        }
        let shown = self.0[..self.0.len().min(SUMMARY_NAMES)].join(", ");
        match self.0.len().saturating_sub(SUMMARY_NAMES) {
            0 => shown,
            more => format!("{shown} and {more} more"),
        }
    }
}

fn is_printable_host(name: &str) -> bool {
    (1..=MAX_HOST_BYTES).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(all: &[&str]) -> CertificateNames {
        CertificateNames::new(all.iter().map(ToString::to_string))
    }

    #[test]
    fn a_wildcard_covers_one_label() {
        let it = names(&["*.a.b", "c.d"]);
        assert!(it.has_wildcard_for("x.a.b") && it.covers("x.a.b"));
        for host in ["a.b", "y.x.a.b", ".a.b", "x.a.b.", "xa.b", "x.c.d", "b", ""] {
            assert!(!it.has_wildcard_for(host), "{host:?}");
            assert!(!it.covers(host), "{host:?}");
        }
        assert!(!names(&["*.", "*", "x*.a.b"]).has_wildcard_for("x."));
        assert!(!names(&["x*.a.b", "a.*.b"]).has_wildcard_for("xy.a.b"));
    }

    #[test]
    fn an_exact_name_is_no_wildcard() {
        let it = names(&["Shop.Example", "*.shop.example"]);
        assert!(it.has_exact("shop.example") && it.covers("shop.example"));
        assert!(!it.has_wildcard_for("shop.example"));
        assert!(!it.has_exact("www.shop.example"));
        assert!(!CertificateNames::default().covers("shop.example"));
    }

    #[test]
    fn a_summary_shows_three_names() {
        assert_eq!(names(&[]).summary(), "no host");
        assert_eq!(names(&["a"]).summary(), "a");
        assert_eq!(names(&["a", "b", "c"]).summary(), "a, b, c");
        assert_eq!(names(&["a", "b", "c", "d", "e"]).summary(), "a, b, c and 2 more");
    }

    #[test]
    fn names_that_no_host_has_are_left_out() {
        let long = "a".repeat(MAX_HOST_BYTES + 1);
        let kept = names(&["", "a b", "a\nb", "ä.example", long.as_str(), "A.b", "c"]);
        assert_eq!(kept, names(&["a.b", "c"]));
        assert_eq!(kept.iter().collect::<Vec<_>>(), ["a.b", "c"]);
    }
}
