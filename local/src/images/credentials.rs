//! Pure: user and password for a registry, from docker's `config.json` or containers' `auth.json`.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Fields of a credential file that are used here.
#[derive(Debug, Default, Deserialize)]
pub(super) struct AuthFile {
    #[serde(default)]
    auths: BTreeMap<String, AuthEntry>,
}

/// Credentials of one registry or repository: `auth` is `user:password` in base64.
#[derive(Debug, Default, Deserialize)]
struct AuthEntry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
}

/// Finds user and password for a repository; the entry with the longest matching key is used.
pub(super) fn find_credentials(
    file: &AuthFile,
    registry: &str,
    repository: &str,
) -> Option<(String, String)> {
    let whole = format!("{registry}/{repository}");
    // `docker login` writes keys as URLs with an API version, skopeo as host names.
    let host = |key: &str| {
        let key = key.trim_start_matches("https://").trim_start_matches("http://");
        key.split("/v1")
            .next()
            .unwrap_or(key)
            .split("/v2")
            .next()
            .unwrap_or(key)
            .trim_end_matches('/')
            .to_owned()
    };
    // Docker Hub's entry has kept the name of its old index.
    let hub = |key: &str| registry == "docker.io" && key == "index.docker.io";
    let fits = |key: &str| {
        key == registry || hub(key) || key == whole || whole.starts_with(&format!("{key}/"))
    };
    let fitting =
        file.auths.iter().map(|(key, entry)| (host(key), entry)).filter(|(key, _)| fits(key));
    let (_, entry) = fitting.max_by_key(|(key, _)| key.len())?;
    match (&entry.username, &entry.password, &entry.auth) {
        (Some(user), Some(password), _) => Some((user.clone(), password.clone())),
        (_, _, Some(auth)) => {
            let text = String::from_utf8(decode_base64(auth)?).ok()?;
            let (user, password) = text.split_once(':')?;
            Some((user.to_owned(), password.trim_end_matches('\0').to_owned()))
        }
        _ => None,
    }
}

/// Decodes standard base64; `None` for characters outside its alphabet.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let (mut bits, mut held) = (0u32, 0);
    for byte in text.trim().trim_end_matches('=').bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_entry_wins() {
        let text = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "aHViOm9uZQ=="},
            "127.0.0.1:5000": {"auth": "dXNlcjpwYXNzOndvcmQ="},
            "127.0.0.1:5000/team": {"username": "team", "password": "two"}
        }}"#;
        let file: AuthFile = serde_json::from_str(text).unwrap();
        let pair = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        for (registry, repository, want) in [
            ("docker.io", "library/nginx", pair("hub", "one")),
            ("127.0.0.1:5000", "hello", pair("user", "pass:word")),
            ("127.0.0.1:5000", "team/hello", pair("team", "two")),
            ("127.0.0.1:5000", "teams/hello", pair("user", "pass:word")),
            ("ghcr.io", "a/b", None),
        ] {
            assert_eq!(
                find_credentials(&file, registry, repository),
                want,
                "{registry}/{repository}"
            );
        }
    }
}
