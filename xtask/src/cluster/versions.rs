//! Pure: versions of Kubernetes and of all other programs of a cluster.

use std::{fmt, str::FromStr};

/// Newest version of Kubernetes that the cluster is tested with.
pub(crate) const NEWEST: KubernetesVersion = KubernetesVersion { minor: 36, patch: 3 };
/// Oldest version: the last patch of the oldest of the four newest minors, which Kubernetes and Knative support.
pub(crate) const OLDEST: KubernetesVersion = KubernetesVersion { minor: 33, patch: 13 };

pub(crate) const CONTAINERD: &str = "v2.4.2";
pub(crate) const ETCD: &str = "v3.7.3";
pub(crate) const COREDNS: &str = "v1.15.0";
/// Newest version of Knative's client whose modules are all published: later ones do not publish `client/pkg`.
pub(crate) const KN: &str = "v0.42.0";
/// Newest version of Prometheus that builds from published modules alone; its `promtool` checks the rules.
pub(crate) const PROMETHEUS: &str = "v0.309.1";
/// Version of Helm that the chart is checked with.
pub(crate) const HELM: &str = "v4.3.1";
/// Version of the Gateway API whose conformance tests run: the newest one that [`GO`] builds.
pub(crate) const GATEWAY_API: &str = "v1.6.3";
/// Version of Go that builds all of them, downloaded if the machine's own is older.
pub(crate) const GO: GoVersion = GoVersion { major: 1, minor: 26, patch: 8 };

/// A release of Kubernetes: `v1.<minor>.<patch>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KubernetesVersion {
    pub(crate) minor: u32,
    pub(crate) patch: u32,
}

impl KubernetesVersion {
    /// Version of the modules that Kubernetes is staged from: `v0.<minor>.<patch>`.
    pub(crate) fn staging(self) -> String {
        format!("v0.{}.{}", self.minor, self.patch)
    }
}

impl fmt::Display for KubernetesVersion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "v1.{}.{}", self.minor, self.patch)
    }
}

impl FromStr for KubernetesVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "newest" => return Ok(NEWEST),
            "oldest" => return Ok(OLDEST),
            _ => {}
        }
        let numbers = text.strip_prefix("v1.").and_then(|rest| rest.split_once('.'));
        let parsed = numbers.and_then(|(minor, patch)| {
            Some(Self { minor: minor.parse().ok()?, patch: patch.parse().ok()? })
        });
        parsed.ok_or_else(|| format!("`{text}` is no version: write newest, oldest or v1.36.3"))
    }
}

/// A release of Go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GoVersion {
    major: u32,
    minor: u32,
    patch: u32,
}

impl GoVersion {
    /// Parses the output of `go version`: `go version go1.26.8 linux/amd64`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let word = text.split_whitespace().find_map(|word| word.strip_prefix("go1."))?;
        let mut numbers = word.split(|letter: char| !letter.is_ascii_digit());
        let minor = numbers.next()?.parse().ok()?;
        let patch = numbers.next().and_then(|text| text.parse().ok()).unwrap_or(0);
        Some(Self { major: 1, minor, patch })
    }

    /// Returns true if it can build the programs that `GO` builds.
    pub(crate) fn is_sufficient(self) -> bool {
        (self.major, self.minor) >= (GO.major, GO.minor)
    }
}

impl fmt::Display for GoVersion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "go{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_named_or_written_out() {
        assert_eq!("newest".parse(), Ok(NEWEST));
        assert_eq!("oldest".parse(), Ok(OLDEST));
        assert_eq!("v1.34.2".parse(), Ok(KubernetesVersion { minor: 34, patch: 2 }));
        for bad in ["", "1.34.2", "v1.34", "v2.0.0", "v1.x.1"] {
            assert!(bad.parse::<KubernetesVersion>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_oldest_is_of_the_four_newest_minors() {
        assert_eq!(NEWEST.minor - OLDEST.minor, 3);
        assert_eq!(OLDEST.staging(), "v0.33.13");
    }

    #[test]
    fn the_output_of_go_version_is_parsed() {
        let version = GoVersion::parse("go version go1.26.8 linux/amd64").unwrap();
        assert!(version.is_sufficient());
        assert_eq!(version.to_string(), "go1.26.8");
        assert!(!GoVersion::parse("go version go1.19.8 linux/amd64").unwrap().is_sufficient());
        assert!(GoVersion::parse("go version go1.27rc1 linux/amd64").unwrap().is_sufficient());
    }
}
