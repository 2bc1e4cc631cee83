//! Pure: kinds of failed requests. Registries differ in the codes and statuses that they send.

use oci_client::errors::{OciDistributionError, OciErrorCode};

/// Returns true if the registry has no image of this name or tag.
pub fn is_missing(error: &OciDistributionError) -> bool {
    use OciErrorCode::{ManifestUnknown, NameUnknown, NotFound};
    matches!(
        error,
        OciDistributionError::ImageManifestNotFoundError(_)
            | OciDistributionError::ServerError { code: 404, .. }
    ) || has_code(error, &[ManifestUnknown, NameUnknown, NotFound])
}

/// Returns true if the registry requires other credentials, by its words and not by a bare status.
pub fn requires_login(error: &OciDistributionError) -> bool {
    use OciErrorCode::{Denied, Unauthorized};
    matches!(
        error,
        OciDistributionError::UnauthorizedError { .. }
            | OciDistributionError::AuthenticationFailure(_)
    ) || has_code(error, &[Unauthorized, Denied])
}

/// Returns true for a status that forbids the request, without a registry's error code.
///
/// The controller takes it for refused credentials and tries the next login. The local node does not: a proxy or
/// firewall sends such a response too, and then its advice to log in would mislead.
pub fn is_forbidden(error: &OciDistributionError) -> bool {
    matches!(error, OciDistributionError::ServerError { code: 401 | 403, .. })
}

/// Returns true if the registry's error response has one of these codes.
fn has_code(error: &OciDistributionError, codes: &[OciErrorCode]) -> bool {
    match error {
        OciDistributionError::RegistryError { envelope, .. } => {
            envelope.errors.iter().any(|it| codes.contains(&it.code))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_counts_as_its_status_and_a_bare_403_is_neither() {
        let coded = |code: &str| {
            let json = format!(r#"{{"errors": [{{"code": "{code}"}}]}}"#);
            let envelope = serde_json::from_str(&json).unwrap();
            OciDistributionError::RegistryError { envelope, url: String::new() }
        };
        let status = |code| OciDistributionError::ServerError {
            code,
            url: String::new(),
            message: String::new(),
        };
        for (error, missing, login, forbidden) in [
            (coded("MANIFEST_UNKNOWN"), true, false, false),
            (coded("NAME_UNKNOWN"), true, false, false),
            (coded("NOT_FOUND"), true, false, false),
            (status(404), true, false, false),
            (coded("UNAUTHORIZED"), false, true, false),
            (coded("DENIED"), false, true, false),
            (OciDistributionError::UnauthorizedError { url: String::new() }, false, true, false),
            (OciDistributionError::AuthenticationFailure(String::new()), false, true, false),
            (status(401), false, false, true),
            (status(403), false, false, true),
            (coded("TOOMANYREQUESTS"), false, false, false),
            (coded("Unauthorized"), false, false, false),
            (status(500), false, false, false),
        ] {
            let kinds = (is_missing(&error), requires_login(&error), is_forbidden(&error));
            assert_eq!(kinds, (missing, login, forbidden), "{error}");
        }
    }
}
