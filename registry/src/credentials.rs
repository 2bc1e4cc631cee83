//! Pure: pull secrets and login files → logins at registries (Kubernetes' `pkg/credentialprovider`; skopeo).
//!
//! The crate `docker_credential` does not replace this: it finds one login by the exact registry, without paths,
//! patterns, `.dockercfg`, `registrytoken` or several logins, and it runs credential helpers.

use std::{collections::BTreeMap, fmt};

use base64::{
    Engine, alphabet,
    engine::general_purpose::{GeneralPurpose, NO_PAD},
};
use serde::Deserialize;

use crate::credential_rules::{CredentialRules, CredentialScope};

/// Decoder of `auth`. Some tools write it without padding, and Go's decoder ignores bits behind the last byte.
const AUTH_DECODER: GeneralPurpose =
    GeneralPurpose::new(&alphabet::STANDARD, NO_PAD.with_decode_allow_trailing_bits(true));

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
    rules: CredentialRules,
    /// Login of each entry, if it has one; the closest entries first.
    entries: Vec<(CredentialScope, Option<RegistryLogin>)>,
}

/// Content of `.dockerconfigjson` and of login files: logins by registry.
#[derive(Deserialize)]
struct DockerConfigJson {
    #[serde(default)]
    auths: BTreeMap<String, DockerConfigEntry>,
}

/// Entry of a registry or repository. `auth` is `user:password` in base64.
#[derive(Default, Deserialize)]
#[serde(default)]
struct DockerConfigEntry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    registrytoken: Option<String>,
}

impl Keyring {
    /// Reads all logins of these secrets; also returns a message for each secret that could not be read.
    pub fn from_pull_secrets(secrets: &[PullSecret]) -> (Self, Vec<String>) {
        let (mut all, mut unread) = (Vec::new(), Vec::new());
        for secret in secrets {
            match read_entries(secret) {
                Ok(found) => all.extend(found),
                Err(why) => unread.push(format!("pull secret {:?}: {why}", secret.name)),
            }
        }
        (Self::new(CredentialRules::PullSecrets, all), unread)
    }

    /// Reads the file that `docker login` or `skopeo login` has written.
    pub fn from_login_file(content: &[u8]) -> Result<Self, serde_json::Error> {
        let config: DockerConfigJson = serde_json::from_slice(content)?;
        Ok(Self::new(CredentialRules::LoginFiles, config.auths))
    }

    fn new(
        rules: CredentialRules,
        entries: impl IntoIterator<Item = (String, DockerConfigEntry)>,
    ) -> Self {
        let entries = entries.into_iter();
        let mut entries: Vec<_> =
            entries.map(|(key, it)| (rules.parse_scope(&key), it.into_login(rules))).collect();
        rules.sort(&mut entries);
        Self { rules, entries }
    }

    /// Logins for a repository, the closest match first. Both names of Docker Hub are the same registry.
    pub fn matching_logins(&self, registry: &str, repository: &str) -> Vec<RegistryLogin> {
        let fits = |scope: &CredentialScope| self.rules.matches(scope, registry, repository);
        let found = self.entries.iter().filter(|(scope, _)| fits(scope));
        found.take(self.rules.max_entries()).filter_map(|(_, login)| login.clone()).collect()
    }
}

impl DockerConfigEntry {
    /// Login of an entry. The rules decide which fields precede others, and if an empty field counts.
    fn into_login(self, rules: CredentialRules) -> Option<RegistryLogin> {
        let Self { auth, username, password, registrytoken } = self;
        let named = match rules {
            CredentialRules::PullSecrets => {
                let token = registrytoken.filter(|it| !it.is_empty()).map(RegistryLogin::Bearer);
                let user = username.filter(|it| !it.is_empty());
                let basic = || Some(RegistryLogin::Basic(user?, password.unwrap_or_default()));
                token.or_else(basic)
            }
            CredentialRules::LoginFiles => {
                username.zip(password).map(|(user, password)| RegistryLogin::Basic(user, password))
            }
        };
        // The field `auth` has user and password in one, and counts where the separate fields are absent.
        named.or_else(|| decode_auth(&auth?))
    }
}

/// Decodes the field `auth`: user and password.
fn decode_auth(auth: &str) -> Option<RegistryLogin> {
    let bytes = AUTH_DECODER.decode(auth.trim().trim_end_matches('=')).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (user, password) = text.split_once(':')?;
    Some(RegistryLogin::Basic(user.to_owned(), password.trim_end_matches('\0').to_owned()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image_reference::ImageReference;

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
        keyring.matching_logins(tag.registry(), tag.repository()).into_iter().map(user).collect()
    }

    #[test]
    fn the_closest_entry_comes_first() {
        let (keyring, unread) = Keyring::from_pull_secrets(&[
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
    fn the_closest_entry_of_a_login_file_wins() {
        let text = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "aHViOm9uZQ=="},
            "127.0.0.1:5000": {"auth": "dXNlcjpwYXNzOndvcmQ="},
            "127.0.0.1:5000/team": {"username": "team", "password": "two"}
        }}"#;
        let file = Keyring::from_login_file(text.as_bytes()).unwrap();
        let pair = |user: &str, password: &str| {
            Some(RegistryLogin::Basic(user.to_owned(), password.to_owned()))
        };
        for (registry, repository, want) in [
            ("docker.io", "library/nginx", pair("hub", "one")),
            ("127.0.0.1:5000", "hello", pair("user", "pass:word")),
            ("127.0.0.1:5000", "team/hello", pair("team", "two")),
            ("127.0.0.1:5000", "teams/hello", pair("user", "pass:word")),
            ("ghcr.io", "a/b", None),
        ] {
            let found = file.matching_logins(registry, repository);
            assert!(found.len() <= 1, "{found:?}");
            assert_eq!(found.into_iter().next(), want, "{registry}/{repository}");
        }
    }

    #[test]
    fn the_two_formats_differ_where_their_rules_do() {
        // Entries, an image, and the logins as a pull secret and as a login file.
        for (auths, image, as_secret, as_file) in [
            (r#""reg.io/v1/team": {"auth": "YTpi"}"#, "reg.io/other/app", &[][..], &["a:b"][..]),
            (r#""*.reg.io": {"auth": "YTpi"}"#, "eu.reg.io/app", &["a:b"], &[]),
            (r#""index.docker.io/team": {"auth": "YTpi"}"#, "team/app", &["a:b"], &[]),
            (
                r#""docker.io/team": {"auth": "YTpi"}, "index.docker.io": {"auth": "Yzpk"}"#,
                "team/app",
                &["a:b", "c:d"],
                &["c:d"],
            ),
            (
                r#""https://reg.io": {"auth": "YTpi"}, "reg.io": {"auth": "Yzpk"}"#,
                "reg.io/app",
                &["a:b", "c:d"],
                &["c:d"],
            ),
            (r#""reg.io": {"registrytoken": "t", "auth": "YTpi"}"#, "reg.io/app", &["t"], &["a:b"]),
            (r#""reg.io": {"username": "u", "auth": "YTpi"}"#, "reg.io/app", &["u:"], &["a:b"]),
            (
                r#""reg.io": {"username": "", "password": "", "auth": "YTpi"}"#,
                "reg.io/app",
                &["a:b"],
                &[":"],
            ),
            (r#""reg.io": {"auth": "YTpi"}, "reg.io/app": {}"#, "reg.io/app", &["a:b"], &[]),
        ] {
            let json = format!("{{\"auths\": {{{auths}}}}}");
            let (of_secret, unread) = Keyring::from_pull_secrets(&[secret("s", &json)]);
            assert_eq!(unread, [] as [String; 0]);
            let of_file = Keyring::from_login_file(json.as_bytes()).unwrap();
            assert_eq!(matching_users(&of_secret, image), as_secret, "{auths}");
            assert_eq!(matching_users(&of_file, image), as_file, "{auths}");
        }
    }

    #[test]
    fn both_read_base64_of_any_padding_and_null_fields() {
        // `YTpiYx` has bits behind its last byte.
        for (auth, want) in [
            ("YTpi", "a:b"),
            ("YTpiYw", "a:bc"),
            ("YTpiYw==", "a:bc"),
            ("YTpiYx==", "a:bc"),
            (" YTpiY2Q=\\n", "a:bcd"),
        ] {
            let json =
                format!(r#"{{"auths": {{"reg.io": {{"auth": "{auth}", "username": null}}}}}}"#);
            let keyrings = [
                Keyring::from_pull_secrets(&[secret("s", &json)]).0,
                Keyring::from_login_file(json.as_bytes()).unwrap(),
            ];
            for keyring in keyrings {
                assert_eq!(matching_users(&keyring, "reg.io/app"), [want], "{auth}");
            }
        }
        let colonless = br#"{"auths": {"reg.io": {"auth": "YQ=="}}}"#;
        let keyring = Keyring::from_login_file(colonless).unwrap();
        assert_eq!(matching_users(&keyring, "reg.io/app"), [] as [String; 0]);
    }

    #[test]
    fn the_old_format_is_read_too() {
        let json = br#"{"ghcr.io": {"auth": "YTpi"}}"#.to_vec();
        let data = [(".dockercfg".to_owned(), json)].into();
        let old = PullSecret { name: "old".into(), kind: "kubernetes.io/dockercfg".into(), data };
        assert_eq!(matching_users(&Keyring::from_pull_secrets(&[old]).0, "ghcr.io/a/b"), ["a:b"]);
    }

    #[test]
    fn an_unreadable_secret_is_reported_and_others_count() {
        let opaque = PullSecret { kind: "Opaque".into(), ..secret("opaque", "") };
        let good = secret("good", r#"{"auths": {"ghcr.io": {"auth": "YTpi"}}}"#);
        let (keyring, unread) = Keyring::from_pull_secrets(&[opaque, secret("torn", "{"), good]);
        assert_eq!(matching_users(&keyring, "ghcr.io/a/b"), ["a:b"]);
        let name = |it: &String| it.split('"').nth(1).map(str::to_owned);
        let names: Vec<_> = unread.iter().filter_map(name).collect();
        assert_eq!(names, ["opaque", "torn"]);
        assert!(!format!("{:?}", secret("s", "password")).contains("password"));
    }
}
