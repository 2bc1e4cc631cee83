//! Pure: parsing of image names, as in go-containerregistry (`pkg/name`, weak validation).

use std::net::{IpAddr, Ipv4Addr};

use oci_client::Reference;

/// A parsed image name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageReference {
    /// The name has a digest, so no query is needed.
    Digest,
    /// The name has a tag, which needs a digest.
    Tag(ImageTag),
}

/// A tag of a repository at a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageTag {
    reference: Reference,
}

impl ImageReference {
    /// Parses an image name: `nginx`, `ghcr.io/a/b:v1`, `registry:5000/a@sha256:…`.
    pub fn parse(image: &str) -> Result<Self, String> {
        let wrong = |why: String| format!("failed to parse image name {image:?} into a tag: {why}");
        let read = image.parse().map_err(|why: oci_client::ParseError| wrong(why.to_string()));
        let reference: Reference = read?;
        // The parser accepts more characters than go-containerregistry does.
        let is_usual =
            |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || "_-./".contains(it);
        if !reference.repository().chars().all(is_usual) {
            let rule = "a repository has only lower-case letters, digits and _ - . /";
            return Err(wrong(rule.into()));
        }
        Ok(match reference.digest() {
            Some(_) => Self::Digest,
            None => Self::Tag(ImageTag { reference }),
        })
    }
}

impl ImageTag {
    /// Host of the registry, with Docker's short form expanded: `index.docker.io`, `ghcr.io`, `localhost:5000`.
    pub fn registry(&self) -> &str {
        self.reference.resolve_registry()
    }

    /// Repository at the registry, such as `library/nginx`.
    pub fn repository(&self) -> &str {
        self.reference.repository()
    }

    /// Image name with this digest instead of the tag.
    pub fn with_digest(&self, digest: &str) -> String {
        format!("{}/{}@{digest}", self.registry(), self.repository())
    }

    /// Reference in the type of the registry client.
    pub(crate) fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Returns true if plain HTTP is permitted: for this machine, private addresses, and names below `.local` or
    /// `.localhost` (`name.Registry.Scheme`).
    pub fn allows_plain_http(&self) -> bool {
        let registry = self.registry();
        let host = host_of(registry);
        is_loopback(registry)
            || host.parse::<Ipv4Addr>().is_ok_and(|ip| ip.is_private())
            || host.ends_with(".local")
            || host.ends_with(".localhost")
    }
}

/// Returns true for a registry on this machine, which docker asks in plain HTTP.
pub fn is_loopback(registry: &str) -> bool {
    let host = host_of(registry);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Host of a registry, without its port and the brackets of an IPv6 address.
fn host_of(registry: &str) -> &str {
    // A colon within the brackets of an IPv6 address precedes no port.
    let bare = registry.rsplit_once(':').filter(|(_, port)| is_port(port));
    let host = bare.map_or(registry, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(image: &str) -> ImageTag {
        match ImageReference::parse(image) {
            Ok(ImageReference::Tag(tag)) => tag,
            other => panic!("{image}: {other:?}"),
        }
    }

    #[test]
    fn short_names_are_docker_hubs() {
        for (image, resolved) in [
            ("nginx", "index.docker.io/library/nginx@sha256:1"),
            ("a/b:v1", "index.docker.io/a/b@sha256:1"),
            ("docker.io/a/b", "index.docker.io/a/b@sha256:1"),
            ("ghcr.io/a/b/c:v1", "ghcr.io/a/b/c@sha256:1"),
            ("localhost:5000/a:v1", "localhost:5000/a@sha256:1"),
            ("registry.localhost:5000/knative/a", "registry.localhost:5000/knative/a@sha256:1"),
        ] {
            assert_eq!(tag(image).with_digest("sha256:1"), resolved);
        }
    }

    #[test]
    fn a_digest_needs_no_registry_and_invalid_names_are_refused() {
        let digest = format!("ghcr.io/a/b@sha256:{}", "a".repeat(64));
        assert_eq!(ImageReference::parse(&digest), Ok(ImageReference::Digest));
        let tagged = format!("ghcr.io/a/b:v1@sha256:{}", "a".repeat(64));
        assert_eq!(ImageReference::parse(&tagged), Ok(ImageReference::Digest));
        for image in ["", "UPPER/case", "a b", "a:", "a@sha256:1"] {
            let said = ImageReference::parse(image).unwrap_err();
            assert!(said.starts_with("failed to parse image name"), "{image}: {said}");
        }
    }

    #[test]
    fn only_registries_nearby_may_be_plain() {
        for (registry, plain) in [
            ("localhost", true),
            ("localhost:5000", true),
            ("registry.localhost:5000", true),
            ("kind.local", true),
            ("127.0.0.1:5000", true),
            ("10.96.0.10:5000", true),
            ("192.168.1.2", true),
            ("8.8.8.8:5000", false),
            ("ghcr.io", false),
            ("local.example.com", false),
            ("notlocalhost.example.com:5000", false),
        ] {
            assert_eq!(tag(&format!("{registry}/a:v1")).allows_plain_http(), plain, "{registry}");
        }
        assert!(!tag("nginx").allows_plain_http());
    }
}
