//! Pure: rules of credential entries: the registry and path that an entry is for, and their order.

use std::cmp::Reverse;

/// Docker Hub's name in image names.
const DOCKER_HUB: &str = "docker.io";
/// Host of Docker Hub's registry, and the name that `docker login` writes.
const DOCKER_HUB_HOST: &str = "index.docker.io";

/// Rules by which entries are read and matched. They differ, because both formats are older than this crate:
///
/// | | `PullSecrets` | `LoginFiles` |
/// |---|---|---|
/// | API version in a key | only directly behind the host | anywhere, with all that follows it |
/// | `*` in a host | any text within one label | no meaning |
/// | `index.docker.io` with a path | Docker Hub | no registry |
/// | closest entry | longest path, then the first | longest key, then the last |
/// | login of an entry | token, then user, then `auth` | user with password, then `auth` |
/// | logins for an image | those of all entries that fit | that of the closest entry only |
///
/// Pull secrets follow the kubelet: a user may write them by hand and for many registries, so keys are patterns, and a
/// refused login is followed by the next one. Login files follow skopeo: a tool writes them, one key for each registry
/// or repository that a user has logged in to. So an entry without a login is no reason to present another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CredentialRules {
    /// Rules of Kubernetes' pull secrets, for the controller.
    #[default]
    PullSecrets,
    /// Rules of the files that `docker login` and `skopeo login` write, for the local node.
    LoginFiles,
}

/// Registry and path of an entry, as its key names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CredentialScope {
    host: String,
    path: String,
}

impl CredentialRules {
    /// Registry and path of an entry's key. `docker login` writes a URL with an API version, skopeo the bare name.
    pub(crate) fn parse_scope(self, key: &str) -> CredentialScope {
        let key = key.trim_start_matches("https://").trim_start_matches("http://");
        let versions = ["/v1", "/v2"];
        let key = match self {
            Self::PullSecrets => key,
            Self::LoginFiles => {
                let end = versions.iter().filter_map(|it| key.find(it)).min();
                &key[..end.unwrap_or(key.len())]
            }
        };
        let key = key.trim_end_matches('/');
        let (host, path) = key.split_once('/').unwrap_or((key, ""));
        // The kubelet drops the API version from the path, and compares the rest of it.
        let path = match self {
            Self::PullSecrets => without_version(path),
            Self::LoginFiles => path,
        };
        CredentialScope { host: host.to_owned(), path: path.to_owned() }
    }

    /// Returns true if an entry is for this repository.
    pub(crate) fn matches(self, scope: &CredentialScope, registry: &str, repository: &str) -> bool {
        let (host, registry) = (expand_host(&scope.host), expand_host(registry));
        let is_registry = match self {
            Self::PullSecrets => host_matches(host, registry),
            Self::LoginFiles => {
                host == registry && (scope.host != DOCKER_HUB_HOST || scope.path.is_empty())
            }
        };
        is_registry && path_matches(&scope.path, repository)
    }

    /// Sorts entries, the closest first; before that they are in the order in which they are written.
    pub(crate) fn sort<T>(self, entries: &mut [(CredentialScope, T)]) {
        // The sort is stable, so of equally close entries the first one stays first.
        match self {
            Self::PullSecrets => entries.sort_by_key(|(scope, _)| Reverse(scope.path.len())),
            Self::LoginFiles => {
                // Of equal keys the last one comes first then.
                entries.reverse();
                entries.sort_by_key(|(scope, _)| Reverse(scope.key_length()));
            }
        }
    }

    /// Greatest number of entries whose logins may be presented for one image.
    pub(crate) fn max_entries(self) -> usize {
        match self {
            Self::PullSecrets => usize::MAX,
            Self::LoginFiles => 1,
        }
    }
}

impl CredentialScope {
    /// Length of host and path with the slash between them.
    fn key_length(&self) -> usize {
        self.host.len() + self.path.len() + usize::from(!self.path.is_empty())
    }
}

/// Host of a registry by its name: Docker Hub has two names, and its credentials are stored under either.
fn expand_host(name: &str) -> &str {
    if name == DOCKER_HUB { DOCKER_HUB_HOST } else { name }
}

/// Path without the API version in front of it, which has no meaning.
fn without_version(path: &str) -> &str {
    match path.split_once('/') {
        Some(("v1" | "v2", rest)) => rest,
        None if matches!(path, "v1" | "v2") => "",
        _ => path,
    }
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
