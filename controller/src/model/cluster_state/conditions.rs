//! Pure: conditions of Knative's objects, in a small representation.

use std::{
    borrow::Cow,
    sync::{Arc, LazyLock},
};

use super::UnixMillis;

/// Reason of a condition: a word for programs and a message for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionReason {
    /// Reason in CamelCase, one word.
    pub reason: Cow<'static, str>,
    /// Message for users, one line.
    pub message: Cow<'static, str>,
}

impl ConditionReason {
    /// Reason of `Active` for a Revision without load.
    pub const NO_TRAFFIC: Self = Self {
        reason: Cow::Borrowed("NoTraffic"),
        message: Cow::Borrowed("The target is not receiving traffic."),
    };
    /// Reason of `CertificateProvisioned` that every Route has.
    pub const NO_TLS: Self = Self {
        reason: Cow::Borrowed("TLSNotEnabled"),
        message: Cow::Borrowed("external-domain-tls is not enabled"),
    };

    /// Makes a reason of its word and its message.
    pub fn new(
        reason: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { reason: reason.into(), message: message.into() }
    }
}

/// Maximum length of an error of another program in a condition, in characters. A proxy of an API server may answer with
/// a whole page.
const MAX_ERROR_CHARS: usize = 500;

/// Returns an error of another program as a part of a condition's message: in one line, and cut if it is long.
pub fn shorten_error(error: &str) -> String {
    let words: Vec<&str> = error.split_whitespace().collect();
    words.join(" ").chars().take(MAX_ERROR_CHARS).collect()
}

/// Status of a condition, with the reason where there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionStatus {
    /// The condition holds; Knative gives some conditions a reason even then.
    True(Option<ConditionReason>),
    /// The status is not known yet; `None`: work goes on.
    Unknown(Option<ConditionReason>),
    /// The condition does not hold, for this reason.
    False(ConditionReason),
}

/// Type of a condition. Each belongs to one kind of object; `*Ready` is that kind's `Ready`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionType {
    /// Type `CertificateProvisioned` of a DomainMapping.
    DomainCertificate,
    /// Type `DomainClaimed` of a DomainMapping.
    DomainClaimed,
    /// Type `IngressReady` of a DomainMapping.
    DomainIngress,
    /// Type `Ready` of a DomainMapping.
    DomainReady,
    /// Type `ReferenceResolved` of a DomainMapping.
    DomainReference,
    /// Type `ConfigurationsReady` of a Service.
    ServiceConfigurations,
    /// Type `Ready` of a Service.
    ServiceReady,
    /// Type `RoutesReady` of a Service.
    ServiceRoutes,
    /// Type `Ready` of a Configuration.
    ConfigurationReady,
    /// Type `AllTrafficAssigned` of a Route.
    RouteTraffic,
    /// Type `CertificateProvisioned` of a Route.
    RouteCertificate,
    /// Type `GatewayPortReady` of a Route, for information only; absent while it has never asked for a gateway port.
    RouteGatewayPort,
    /// Type `IngressReady` of a Route.
    RouteIngress,
    /// Type `Ready` of a Route.
    RouteReady,
    /// Type `Active` of a Revision, for information only.
    RevisionActive,
    /// Type `AutoscalingAnnotationsValid` of a Revision, for information only; absent while none was ever refused.
    RevisionAnnotations,
    /// Type `ContainerHealthy` of a Revision.
    RevisionHealthy,
    /// Type `Ready` of a Revision.
    RevisionReady,
    /// Type `ResourcesAvailable` of a Revision.
    RevisionResources,
    /// Type `StandbyAvailable` of a Revision, for information only; absent while no pod was ever to stand by.
    RevisionStandby,
    /// Type `Ready` of the PodAutoscaler of a scaled Service, as far as the Service decides it: false while it is
    /// refused.
    ScaledServiceReady,
}

/// Conditions of one app, Revision or DomainMapping, each with the moment of its last change, to the second, as objects
/// show it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConditionSet(Vec<StoredCondition>);

/// A condition in its stored form of 16 bytes: a reason costs memory of its own only where it is an unusual one.
#[derive(Clone, Debug, PartialEq)]
struct StoredCondition {
    reason: Option<Arc<ConditionReason>>,
    /// Moment of the last change, in seconds since 1970.
    last_transition: u32,
    condition_type: ConditionType,
    status: StoredConditionStatus,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoredConditionStatus {
    True,
    Unknown,
    False,
}

/// Reasons of nearly every sleeping service, which all conditions share.
static SHARED_REASONS: LazyLock<[Arc<ConditionReason>; 2]> =
    LazyLock::new(|| [ConditionReason::NO_TRAFFIC, ConditionReason::NO_TLS].map(Arc::new));

impl StoredCondition {
    fn new(condition_type: ConditionType, status: ConditionStatus, now: UnixMillis) -> Self {
        let (status, reason) = match status {
            ConditionStatus::True(reason) => (StoredConditionStatus::True, reason),
            ConditionStatus::Unknown(reason) => (StoredConditionStatus::Unknown, reason),
            ConditionStatus::False(reason) => (StoredConditionStatus::False, Some(reason)),
        };
        let share = |reason: ConditionReason| {
            let common = SHARED_REASONS.iter().find(|common| ***common == reason);
            common.cloned().unwrap_or_else(|| Arc::new(reason))
        };
        // Objects show whole seconds, so more precision would only produce differences that no reader sees.
        let last_transition = u32::try_from(now.0 / 1000).unwrap_or(u32::MAX);
        Self { reason: reason.map(share), last_transition, condition_type, status }
    }

    fn last_transition(&self) -> UnixMillis {
        UnixMillis(u64::from(self.last_transition) * 1000)
    }

    fn condition_status(&self) -> ConditionStatus {
        let reason = self.reason.as_deref().cloned();
        match self.status {
            StoredConditionStatus::True => ConditionStatus::True(reason),
            StoredConditionStatus::Unknown => ConditionStatus::Unknown(reason),
            // `new` stores a reason with every false status; the default is never reached.
            StoredConditionStatus::False => {
                ConditionStatus::False(reason.unwrap_or_else(|| ConditionReason::new("", "")))
            }
        }
    }
}

impl ConditionSet {
    /// Sets a condition. The moment of its last change moves only if status or reason changed.
    pub fn set(&mut self, kind: ConditionType, status: ConditionStatus, now: UnixMillis) {
        let condition = StoredCondition::new(kind, status, now);
        match self.0.iter_mut().find(|stored| stored.condition_type == kind) {
            // Unchanged: `lastTransitionTime` stays.
            Some(stored)
                if (stored.status, &stored.reason) == (condition.status, &condition.reason) => {}
            Some(slot) => *slot = condition,
            None => {
                // A Revision usually has four conditions, an app eight: growth by doubling would waste memory.
                if self.0.len().is_multiple_of(4) {
                    self.0.reserve_exact(4);
                }
                self.0.push(condition);
            }
        }
    }

    /// Returns the status of a condition; unknown if it was never set.
    pub fn get(&self, kind: ConditionType) -> ConditionStatus {
        let condition = self.0.iter().find(|stored| stored.condition_type == kind);
        condition.map_or(ConditionStatus::Unknown(None), StoredCondition::condition_status)
    }

    /// Returns true if the condition was ever set.
    pub fn is_set(&self, kind: ConditionType) -> bool {
        self.0.iter().any(|stored| stored.condition_type == kind)
    }

    /// Returns true if the condition's status is true.
    pub fn is_true(&self, kind: ConditionType) -> bool {
        matches!(self.get(kind), ConditionStatus::True(_))
    }

    /// Iterates over all conditions, each with the moment of its last change.
    pub fn iter(&self) -> impl Iterator<Item = (ConditionType, UnixMillis, ConditionStatus)> {
        self.0.iter().map(|condition| {
            (condition.condition_type, condition.last_transition(), condition.condition_status())
        })
    }

    /// Computes `Ready` of an object from the conditions it depends on, by Knative's rule: all true, else a false one,
    /// else an unknown one. Among several, the first of `dependents` counts; Knative takes the one that changed last.
    /// An unknown one with a message goes before those without: else `Deploying` would hide that a container listens
    /// where no client can reach it.
    pub fn summarize(&self, dependents: &[ConditionType]) -> ConditionStatus {
        let all: Vec<ConditionStatus> = dependents.iter().map(|kind| self.get(*kind)).collect();
        let worst = all.iter().find(|status| matches!(status, ConditionStatus::False(_)));
        let has_message = |status: &&ConditionStatus| matches!(status, ConditionStatus::Unknown(Some(reason)) if !reason.message.is_empty());
        let worst = worst.or_else(|| all.iter().find(has_message));
        let worst = worst
            .or_else(|| all.iter().find(|status| matches!(status, ConditionStatus::Unknown(_))));
        worst.cloned().unwrap_or(ConditionStatus::True(None))
    }
}

/// Conditions of a kind of object with their types, in Knative's order (by type).
pub(crate) type ConditionTable = [(ConditionType, &'static str)];

pub(crate) const SERVICE_CONDITIONS: [(ConditionType, &str); 3] = [
    (ConditionType::ServiceConfigurations, "ConfigurationsReady"),
    (ConditionType::ServiceReady, "Ready"),
    (ConditionType::ServiceRoutes, "RoutesReady"),
];

pub(crate) const CONFIGURATION_CONDITIONS: [(ConditionType, &str); 1] =
    [(ConditionType::ConfigurationReady, "Ready")];

pub(crate) const ROUTE_CONDITIONS: [(ConditionType, &str); 5] = [
    (ConditionType::RouteTraffic, "AllTrafficAssigned"),
    (ConditionType::RouteCertificate, "CertificateProvisioned"),
    (ConditionType::RouteGatewayPort, "GatewayPortReady"),
    (ConditionType::RouteIngress, "IngressReady"),
    (ConditionType::RouteReady, "Ready"),
];

pub(crate) const DOMAIN_CONDITIONS: [(ConditionType, &str); 5] = [
    (ConditionType::DomainCertificate, "CertificateProvisioned"),
    (ConditionType::DomainClaimed, "DomainClaimed"),
    (ConditionType::DomainIngress, "IngressReady"),
    (ConditionType::DomainReady, "Ready"),
    (ConditionType::DomainReference, "ReferenceResolved"),
];

pub(crate) const REVISION_CONDITIONS: [(ConditionType, &str); 6] = [
    (ConditionType::RevisionActive, "Active"),
    (ConditionType::RevisionAnnotations, "AutoscalingAnnotationsValid"),
    (ConditionType::RevisionHealthy, "ContainerHealthy"),
    (ConditionType::RevisionReady, "Ready"),
    (ConditionType::RevisionResources, "ResourcesAvailable"),
    (ConditionType::RevisionStandby, "StandbyAvailable"),
];
