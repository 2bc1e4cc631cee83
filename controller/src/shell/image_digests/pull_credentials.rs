//! Pure: pull secrets → logins at registries (Kubernetes' `pkg/credentialprovider`).

use std::{collections::BTreeMap, fmt};

use base64::{Engine, engine::general_purpose};
use serde::Deserialize;

use super::image_reference::ImageTag;

/// A Secret that may hold credentials of registries.
#[derive(Clone, PartialEq, Eq)]
pub struct PullSecret {
    /// Name of the Secret, for messages.
    pub name: String,
    /// Type of the Secret: `kubernetes.io/dockerconfigjson` or `kubernetes.io/dockercfg`; others hold no credentials.
    pub kind: String,
    /// Data of the Secret, base64-decoded.
    pub data: BTreeMap<String, Vec<u8>>,
}

impl fmt::Debug for PullSecret {
    /// Omits the data, so that credentials never reach a log.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("PullSecret")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// Credentials to present to a registry.
#[derive(Clone, PartialEq, Eq)]
pub enum RegistryLogin {
    /// User name and password, in this order.
    Basic(String, String),
    /// A token that is sent to the registry unchanged.
    Bearer(String),
}

impl fmt::Debug for RegistryLogin {
    /// Omits passwords and tokens, so that they never reach a log.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Basic(user, _) => out.debug_tuple("Basic").field(user).finish_non_exhaustive(),
            Self::Bearer(_) => out.debug_tuple("Bearer").finish_non_exhaustive(),
        }
    }
}

/// Logins by registry and path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keyring {
    /// Logins by registry and path, the longest path first.
    entries: Vec<(CredentialScope, RegistryLogin)>,
}

/// A registry, and a path in it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CredentialScope {
    path: String,
    host: String,
}

/// Content of `.dockerconfigjson`: logins by registry.
#[derive(Deserialize)]
struct DockerConfigJson {
    #[serde(default)]
    auths: BTreeMap<String, DockerConfigEntry>,
}

/// One login of `.dockerconfigjson` or `.dockercfg`.
#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct DockerConfigEntry {
    auth: String,
    username: String,
    password: String,
    registrytoken: String,
}

impl Keyring {
    /// Reads all logins of these secrets; also returns a message for each secret that could not be read.
    pub fn new(secrets: &[PullSecret]) -> (Self, Vec<String>) {
        let (mut it, mut unread) = (Self::default(), Vec::new());
        for secret in secrets {
            match read_entries(secret) {
                Ok(found) => {
                    let logins = found.into_iter();
                    let logins =
                        logins.filter_map(|(key, it)| Some((parse_scope(&key), it.into_login()?)));
                    it.entries.extend(logins);
                }
                Err(why) => unread.push(format!("pull secret {:?}: {why}", secret.name)),
            }
        }
        // The longest path wins. The sort is stable, so of equal ones the secret that is named first wins.
        it.entries.sort_by_key(|(place, _)| std::cmp::Reverse(place.path.len()));
        (it, unread)
    }

    /// Logins for this image, the closest match first.
    pub fn matching_logins(&self, tag: &ImageTag) -> Vec<RegistryLogin> {
        let (registry, repository) = (tag.registry(), tag.repository());
        let fits = |place: &CredentialScope| {
            host_matches(&place.host, registry) && path_matches(&place.path, repository)
        };
        let found = self.entries.iter().filter(|(place, _)| fits(place));
        found.map(|(_, login)| login.clone()).collect()
    }
}

impl DockerConfigEntry {
    /// The login of an entry; a token precedes a user, and a user the combined `auth`.
    fn into_login(self) -> Option<RegistryLogin> {
        if !self.registrytoken.is_empty() {
            return Some(RegistryLogin::Bearer(self.registrytoken));
        }
        if !self.username.is_empty() {
            return Some(RegistryLogin::Basic(self.username, self.password));
        }
        // Some tools write `auth` without base64 padding.
        let decoded = general_purpose::STANDARD
            .decode(self.auth.trim())
            .or_else(|_padded| general_purpose::STANDARD_NO_PAD.decode(self.auth.trim()));
        let text = String::from_utf8(decoded.ok()?).ok()?;
        let (user, password) = text.split_once(':')?;
        Some(RegistryLogin::Basic(user.to_owned(), password.trim_end_matches('\0').to_owned()))
    }
}

fn read_entries(secret: &PullSecret) -> Result<BTreeMap<String, DockerConfigEntry>, String> {
    let read = |key: &str| secret.data.get(key).ok_or_else(|| format!("it has no key {key:?}"));
    match secret.kind.as_str() {
        "kubernetes.io/dockerconfigjson" => {
            let config: Result<DockerConfigJson, _> =
                serde_json::from_slice(read(".dockerconfigjson")?);
            config.map(|it| it.auths).map_err(|why| why.to_string())
        }
        "kubernetes.io/dockercfg" => {
            serde_json::from_slice(read(".dockercfg")?).map_err(|why| why.to_string())
        }
        other => Err(format!("its type is {other:?}, not kubernetes.io/dockerconfigjson")),
    }
}

/// Registry and path of an entry's key. Docker's own key has a scheme and an API version, which have no meaning.
fn parse_scope(key: &str) -> CredentialScope {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    let path = path.trim_end_matches('/');
    let path = if matches!(path, "v1" | "v2") { "" } else { path };
    let path = path.strip_prefix("v1/").or_else(|| path.strip_prefix("v2/")).unwrap_or(path);
    // Docker Hub has two names, and its credentials are stored under either.
    let host = if host == "docker.io" { "index.docker.io" } else { host };
    CredentialScope { host: host.to_owned(), path: path.to_owned() }
}

/// Returns true if the registry matches an entry's host. `*` stands for any text within one label; ports must be equal.
fn host_matches(entry: &str, registry: &str) -> bool {
    let split = |it: &str| {
        let (host, port) = it.rsplit_once(':').unwrap_or((it, ""));
        (host.split('.').map(str::to_owned).collect::<Vec<_>>(), port.to_owned())
    };
    let ((want, want_port), (have, have_port)) = (split(entry), split(registry));
    want_port == have_port
        && want.len() == have.len()
        && want.iter().zip(&have).all(|(want, have)| label_matches(want, have))
}

/// Returns true if one label of a host matches a pattern with `*`.
fn label_matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(first) else { return false };
    (0..=text.len()).filter_map(|at| text.get(at..)).any(|text| label_matches(rest, text))
}

/// Returns true if a repository lies at or below a path.
fn path_matches(prefix: &str, repository: &str) -> bool {
    let rest = repository.strip_prefix(prefix);
    prefix.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::image_digests::image_reference::ImageReference;

    fn secret(name: &str, json: &str) -> PullSecret {
        let data = [(".dockerconfigjson".to_owned(), json.as_bytes().to_vec())].into();
        PullSecret { name: name.into(), kind: "kubernetes.io/dockerconfigjson".into(), data }
    }

    fn matching_users(keyring: &Keyring, image: &str) -> Vec<String> {
        let Ok(ImageReference::Tag(tag)) = ImageReference::parse(image) else { panic!("{image}") };
        let user = |it: RegistryLogin| match it {
            RegistryLogin::Basic(user, password) => format!("{user}:{password}"),
            RegistryLogin::Bearer(token) => token,
        };
        keyring.matching_logins(&tag).into_iter().map(user).collect()
    }

    #[test]
    fn the_closest_entry_comes_first() {
        let (keyring, unread) = Keyring::new(&[
            secret(
                "one",
                r#"{"auths": {
                    "https://index.docker.io/v1/": {"auth": "aHViOm9uZQ=="},
                    "127.0.0.1:5000": {"auth": "dXNlcjpwYXNzOndvcmQ"},
                    "127.0.0.1:5000/team": {"username": "team", "password": "two"},
                    "*.example.com": {"username": "any", "password": "x"},
                    "token.io": {"registrytoken": "t0ken"}
                }}"#,
            ),
            secret("two", r#"{"auths": {"127.0.0.1:5000": {"username": "second"}}}"#),
        ]);
        assert_eq!(unread, [] as [String; 0]);
        for (image, want) in [
            ("nginx", &["hub:one"][..]),
            ("127.0.0.1:5000/hello", &["user:pass:word", "second:"]),
            ("127.0.0.1:5000/team/hello", &["team:two", "user:pass:word", "second:"]),
            ("127.0.0.1:5000/teams/hello", &["user:pass:word", "second:"]),
            ("127.0.0.1:5001/hello", &[]),
            ("eu.example.com/a", &["any:x"]),
            ("example.com/a", &[]),
            ("a.eu.example.com/a", &[]),
            ("token.io/a", &["t0ken"]),
        ] {
            assert_eq!(matching_users(&keyring, image), want, "{image}");
        }
    }

    #[test]
    fn the_old_format_is_read_too() {
        let json = br#"{"ghcr.io": {"auth": "YTpi"}}"#.to_vec();
        let data = [(".dockercfg".to_owned(), json)].into();
        let old = PullSecret { name: "old".into(), kind: "kubernetes.io/dockercfg".into(), data };
        assert_eq!(matching_users(&Keyring::new(&[old]).0, "ghcr.io/a/b"), ["a:b"]);
    }

    #[test]
    fn an_unreadable_secret_is_reported_and_others_count() {
        let opaque = PullSecret { kind: "Opaque".into(), ..secret("opaque", "") };
        let good = secret("good", r#"{"auths": {"ghcr.io": {"auth": "YTpi"}}}"#);
        let (keyring, unread) = Keyring::new(&[opaque, secret("torn", "{"), good]);
        assert_eq!(matching_users(&keyring, "ghcr.io/a/b"), ["a:b"]);
        let name = |it: &String| it.split('"').nth(1).map(str::to_owned);
        let names: Vec<_> = unread.iter().filter_map(name).collect();
        assert_eq!(names, ["opaque", "torn"]);
        assert!(!format!("{:?}", secret("s", "password")).contains("password"));
    }
}
