//! Pure: certificates that the platform requests for hosts, as the API server holds them, with the challenges by which
//! an authority checks a host.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use common::wire::NamespacedName;
use smol_str::SmolStr;

use super::{ObjectMetaSummary, Uid};

/// Objects about requested certificates, by name.
#[derive(Clone, Debug, Default)]
pub struct ObservedRequests {
    /// Certificates of the group `networking.internal.knative.dev`.
    pub certificates: BTreeMap<NamespacedName, RequestedCertificate>,
    /// Certificates of cert-manager.
    pub issued: BTreeMap<NamespacedName, IssuedCertificate>,
    /// HTTP-01 challenges of cert-manager.
    pub challenges: BTreeMap<NamespacedName, ObservedChallenge>,
    /// Services of the pods that solve challenges.
    pub solvers: BTreeMap<NamespacedName, ChallengeSolver>,
    /// Namespaces, as far as their certificates depend on them.
    pub namespaces: BTreeMap<SmolStr, CertificateNamespace>,
    /// Presence of cert-manager's kinds in the cluster.
    pub cert_manager: CertManagerPresence,
}

/// Presence of cert-manager's kinds in the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CertManagerPresence {
    /// The API server was not asked yet.
    #[default]
    Unknown,
    /// The API server has none of the kinds.
    Missing,
    /// The API server has the kinds.
    Present,
}

/// A certificate of the group `networking.internal.knative.dev`: a request for a Secret with a certificate.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestedCertificate {
    /// Metadata of the object.
    pub meta: ObjectMetaSummary,
    /// UID of the owner with `controller: true`.
    pub owner_uid: Option<Uid>,
    /// Hosts of the certificate; `*.` begins one for all hosts below a domain.
    pub hosts: Vec<Box<str>>,
    /// Name of the Secret that gets the certificate.
    pub secret: Box<str>,
    /// Domain of the label for certificates of namespaces, cut if it is long; `None`: it is for a single host.
    pub wildcard_domain: Option<Box<str>>,
    /// Status `Ready` of the object.
    pub readiness: CertificateReadiness,
    /// End of the certificate in the Secret (`status.notAfter`), RFC 3339; `None`: there was none yet.
    pub not_after: Option<Box<str>>,
    /// True once the Secret has had a certificate: the object is ready, or its status names the end of a certificate.
    pub is_issued: bool,
    /// True once the object is being deleted.
    pub is_terminating: bool,
}

/// Status of the condition `Ready` of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateReadiness {
    /// Value of the condition.
    pub status: ReadyStatus,
    /// Reason in one word; empty if there is none.
    pub reason: Box<str>,
    /// Message for users; empty if there is none.
    pub message: Box<str>,
    /// Time of the last change, as the object has it; empty if there is no condition.
    pub since: Box<str>,
}

/// Value of a condition `Ready`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadyStatus {
    /// The condition is true.
    True,
    /// The condition is false.
    False,
    /// The condition is unknown, or missing.
    #[default]
    Unknown,
}

/// A certificate of cert-manager.
#[derive(Clone, Debug, PartialEq)]
pub struct IssuedCertificate {
    /// UID of the owner with `controller: true`.
    pub owner_uid: Option<Uid>,
    /// Condition `Ready`; `None`: there is none yet.
    pub readiness: Option<CertificateReadiness>,
    /// End of the certificate (`status.notAfter`), RFC 3339.
    pub not_after: Option<Box<str>>,
}

/// An HTTP-01 challenge of cert-manager: an authority asks a host for a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedChallenge {
    /// UID of the object, which owns its solver.
    pub uid: Uid,
    /// Host that the authority asks, in lower case.
    pub host: String,
    /// Token of the challenge, which ends the path of the request.
    pub token: String,
    /// Text that the authority expects: the token and the hash of the account's public key.
    pub response: String,
}

/// Service of the pod that solves an HTTP-01 challenge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChallengeSolver {
    /// UID of the challenge that owns it.
    pub challenge_uid: Uid,
    /// ClusterIPs of the Service, IPv4 first.
    pub addresses: Box<[IpAddr]>,
    /// Port of the Service.
    pub port: u16,
}

/// A namespace, as far as its certificate depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateNamespace {
    /// UID of the namespace.
    pub uid: Uid,
    /// Labels, by which the operator chooses namespaces with one certificate.
    pub labels: BTreeMap<String, String>,
    /// Class of certificates that an annotation sets.
    pub class: Option<Box<str>>,
}

/// A challenge with its solver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SolvedChallenge<'a> {
    /// Challenge that the solver answers.
    pub challenge: &'a ObservedChallenge,
    /// Name of the solver's Service.
    pub service: &'a NamespacedName,
    /// Solver that answers the challenge.
    pub solver: &'a ChallengeSolver,
}

impl RequestedCertificate {
    /// Returns true if it covers a host: by the host itself, or by all hosts one label deep.
    pub fn covers(&self, host: &str) -> bool {
        let below = host.split_once('.').map(|(_, domain)| domain);
        self.hosts.iter().any(|it| {
            **it == *host || it.strip_prefix("*.").is_some_and(|domain| below == Some(domain))
        })
    }
}

impl ObservedRequests {
    /// Iterates over the certificates of a namespace.
    pub fn of_namespace(
        &self,
        namespace: &str,
    ) -> impl Iterator<Item = (&NamespacedName, &RequestedCertificate)> {
        let from = self.certificates.range(NamespacedName::new(namespace, "")..);
        from.take_while(move |(name, _)| name.namespace == namespace)
    }

    /// Returns the Secrets of certificates that were issued.
    pub fn issued_secrets(&self) -> BTreeSet<NamespacedName> {
        let issued = self.certificates.iter().filter(|(_, it)| it.is_issued && !it.is_terminating);
        issued.map(|(name, it)| NamespacedName::new(name.namespace.clone(), &*it.secret)).collect()
    }

    /// Returns the challenges of these hosts in a namespace that have a solver, by host and token. Each authority asks
    /// for a token of its own.
    pub fn solved_challenges(&self, namespace: &str, hosts: &[&str]) -> Vec<SolvedChallenge<'_>> {
        let from = self.challenges.range(NamespacedName::new(namespace, "")..);
        let own = from.take_while(|(name, _)| name.namespace == namespace);
        let own = own.filter(|(_, it)| hosts.contains(&it.host.as_str()));
        let mut all: Vec<SolvedChallenge<'_>> =
            own.filter_map(|(_, it)| self.solved(namespace, it)).collect();
        all.sort_by(|a, b| {
            let key =
                |it: &SolvedChallenge<'_>| (it.challenge.host.clone(), it.challenge.token.clone());
            key(a).cmp(&key(b))
        });
        all
    }

    /// Returns the challenges in a namespace for hosts that `is_own` accepts, by host and token.
    pub fn challenges_of(
        &self,
        namespace: &str,
        is_own: impl Fn(&str) -> bool,
    ) -> Vec<&ObservedChallenge> {
        let from = self.challenges.range(NamespacedName::new(namespace, "")..);
        let own = from.take_while(|(name, _)| name.namespace == namespace);
        let mut all: Vec<&ObservedChallenge> =
            own.map(|(_, it)| it).filter(|it| is_own(&it.host)).collect();
        all.sort_by(|a, b| (&a.host, &a.token).cmp(&(&b.host, &b.token)));
        all
    }

    fn solved<'a>(
        &'a self,
        namespace: &str,
        challenge: &'a ObservedChallenge,
    ) -> Option<SolvedChallenge<'a>> {
        let from = self.solvers.range(NamespacedName::new(namespace, "")..);
        let mut own = from.take_while(|(name, _)| name.namespace == namespace);
        let (service, solver) = own.find(|(_, it)| it.challenge_uid == challenge.uid)?;
        Some(SolvedChallenge { challenge, service, solver })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(hosts: &[&str]) -> RequestedCertificate {
        RequestedCertificate {
            meta: ObjectMetaSummary::default(),
            owner_uid: None,
            hosts: hosts.iter().map(|it| (*it).into()).collect(),
            secret: "a".into(),
            wildcard_domain: None,
            readiness: CertificateReadiness::default(),
            not_after: None,
            is_issued: false,
            is_terminating: false,
        }
    }

    #[test]
    fn a_certificate_of_a_namespace_covers_one_label() {
        let it = certificate(&["*.team.example.com", "b.test"]);
        for host in ["a.team.example.com", "b.test"] {
            assert!(it.covers(host), "{host}");
        }
        for host in ["team.example.com", "a.b.team.example.com", "a.b.test", "other"] {
            assert!(!it.covers(host), "{host}");
        }
    }

    #[test]
    fn a_challenge_finds_the_solver_that_it_owns() {
        let name = |name: &str| NamespacedName::new("team", name);
        let challenge = |uid: u128, host: &str| ObservedChallenge {
            uid: Uid(uid),
            host: host.into(),
            token: format!("t{uid}"),
            response: String::new(),
        };
        let solver = |uid: u128| ChallengeSolver {
            challenge_uid: Uid(uid),
            addresses: Box::default(),
            port: 8089,
        };
        let mut all = ObservedRequests::default();
        all.challenges.insert(name("x"), challenge(2, "a.test"));
        all.challenges.insert(name("y"), challenge(1, "a.test"));
        all.challenges.insert(name("z"), challenge(3, "b.test"));
        all.challenges.insert(NamespacedName::new("other", "x"), challenge(4, "a.test"));
        for uid in [1, 2, 3, 4] {
            all.solvers.insert(name(&format!("s{uid}")), solver(uid));
        }
        let found = all.solved_challenges("team", &["a.test"]);
        let found: Vec<(&str, &str)> =
            found.iter().map(|it| (&*it.challenge.token, it.service.name.as_str())).collect();
        assert_eq!(found, [("t1", "s1"), ("t2", "s2")]);
        all.solvers.remove(&name("s1"));
        assert_eq!(all.solved_challenges("team", &["a.test"]).len(), 1);
    }
}
