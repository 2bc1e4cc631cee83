//! Pure: certificates of clients: what DomainMappings ask for, and the authorities in the Secrets that they name.

use std::{collections::BTreeMap, sync::Arc};

use common::wire::{ClientCaMaterial, NamespacedName, is_secret_name};

use super::SecretReadState;
use crate::model::knative::key;

/// Authorities of client certificates of the Secrets that DomainMappings name.
#[derive(Clone, Debug, Default)]
pub struct ObservedClientCas {
    /// State of each named Secret, also of one that was not read yet.
    pub by_secret: BTreeMap<NamespacedName, ClientCaState>,
}

/// State of the authorities in one named Secret.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientCaState {
    /// Authorities that activators have. Only usable ones replace them.
    pub in_force: Option<Arc<ClientCaMaterial>>,
    /// Result of the last read of the Secret.
    pub last_read: SecretReadState,
}

/// Result of one read of a Secret with authorities.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientCaRead {
    /// The Secret holds authorities, which are checked.
    Usable(Arc<ClientCaMaterial>),
    /// The Secret does not exist.
    Absent,
    /// The content of the Secret cannot be used, for this reason.
    Faulty(String),
    /// The API server has returned this error.
    Unreadable(String),
}

impl ClientCaState {
    /// Returns the state of a Secret that was not read yet.
    pub fn pending() -> Self {
        Self { in_force: None, last_read: SecretReadState::Pending }
    }

    /// Applies the result of a read. Nothing but usable authorities replaces those in force.
    pub fn apply_read(&mut self, read: ClientCaRead) {
        self.last_read = match read {
            ClientCaRead::Usable(material) => {
                self.in_force = Some(material);
                SecretReadState::InForce
            }
            ClientCaRead::Absent => SecretReadState::Absent,
            ClientCaRead::Faulty(fault) => SecretReadState::Refused(fault),
            ClientCaRead::Unreadable(error) => match self.last_read {
                SecretReadState::Pending | SecretReadState::Unreadable(_) => {
                    SecretReadState::Unreadable(error)
                }
                // An error says nothing about the Secret, so an earlier result stays.
                SecretReadState::InForce
                | SecretReadState::Absent
                | SecretReadState::Refused(_) => return,
            },
        };
    }
}

/// Demand of a DomainMapping's annotations for certificates of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientAuthSpec {
    /// Name of the Secret with the authorities; `None`: there is no valid name.
    pub ca_secret: Option<Box<str>>,
    /// True if clients without a certificate are accepted.
    pub is_optional: bool,
    /// Reason for which the annotations cannot be followed. The domain accepts no client then.
    pub fault: Option<Box<str>>,
}

impl ClientAuthSpec {
    /// Reads the annotations; `None`: there are none. Annotations that cannot be followed never open the domain.
    pub fn from_annotations(ca: Option<&str>, mode: Option<&str>) -> Option<Self> {
        if ca.is_none() && mode.is_none() {
            return None;
        }
        let fault = client_auth_fault(ca, mode);
        let ca_secret = ca.filter(|_| fault.is_none()).map(Into::into);
        let is_optional = fault.is_none() && mode == Some("optional");
        Some(Self { ca_secret, is_optional, fault: fault.map(Into::into) })
    }
}

/// Returns the reason for which the annotations cannot be followed.
fn client_auth_fault(ca: Option<&str>, mode: Option<&str>) -> Option<String> {
    let (ca_key, mode_key) = (key::CLIENT_CA, key::CLIENT_AUTH);
    match (ca, mode) {
        (None, _) => Some(format!("{mode_key} needs {ca_key}")),
        (Some(name), _) if !is_secret_name(name) => {
            Some(format!("{ca_key} is {name:?}, must be the name of a Secret"))
        }
        (Some(_), None | Some("require" | "optional")) => None,
        (Some(_), Some(other)) => {
            Some(format!("{mode_key} is {other:?}, must be require or optional"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_usable_authorities_replaces_those_in_force() {
        let material = |byte| Arc::new(ClientCaMaterial(vec![vec![byte]]));
        for (read, expected) in [
            (ClientCaRead::Absent, SecretReadState::Absent),
            (ClientCaRead::Faulty("fault".into()), SecretReadState::Refused("fault".into())),
            (ClientCaRead::Unreadable("error".into()), SecretReadState::InForce),
        ] {
            let mut state = ClientCaState::pending();
            state.apply_read(ClientCaRead::Usable(material(1)));
            state.apply_read(read);
            assert_eq!((state.in_force, state.last_read), (Some(material(1)), expected));
        }
        let mut state = ClientCaState::pending();
        state.apply_read(ClientCaRead::Unreadable("one".into()));
        state.apply_read(ClientCaRead::Unreadable("two".into()));
        assert_eq!(state.last_read, SecretReadState::Unreadable("two".into()));
        state.apply_read(ClientCaRead::Usable(material(1)));
        state.apply_read(ClientCaRead::Usable(material(2)));
        assert_eq!(
            (state.in_force, state.last_read),
            (Some(material(2)), SecretReadState::InForce)
        );
    }

    #[test]
    fn annotations_that_cannot_be_followed_accept_no_client() {
        let read = ClientAuthSpec::from_annotations;
        assert_eq!(read(None, None), None);
        for (mode, is_optional) in
            [(None, false), (Some("require"), false), (Some("optional"), true)]
        {
            let expected =
                ClientAuthSpec { ca_secret: Some("clients".into()), is_optional, fault: None };
            assert_eq!(read(Some("clients"), mode), Some(expected));
        }
        for (ca, mode, fault) in [
            (None, Some("optional"), "rouse.dev/client-auth needs rouse.dev/client-ca"),
            (Some(""), None, "rouse.dev/client-ca is \"\", must be the name of a Secret"),
            (
                Some("a/b"),
                Some("x"),
                "rouse.dev/client-ca is \"a/b\", must be the name of a Secret",
            ),
            (Some("a"), Some(""), "rouse.dev/client-auth is \"\", must be require or optional"),
            (
                Some("a"),
                Some("Optional"),
                "rouse.dev/client-auth is \"Optional\", must be require or optional",
            ),
        ] {
            let expected =
                ClientAuthSpec { ca_secret: None, is_optional: false, fault: Some(fault.into()) };
            assert_eq!(read(ca, mode), Some(expected));
        }
    }
}
