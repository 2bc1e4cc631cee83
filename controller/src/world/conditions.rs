//! Pure: Knative's conditions, kept small.

use std::{
    borrow::Cow,
    sync::{Arc, LazyLock},
};

use super::Stamp;

/// A reason for machines and a line for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    /// One word.
    pub reason: Cow<'static, str>,
    /// One line.
    pub message: Cow<'static, str>,
}

impl Why {
    /// A Revision without load.
    pub const NO_TRAFFIC: Self = Self {
        reason: Cow::Borrowed("NoTraffic"),
        message: Cow::Borrowed("The target is not receiving traffic."),
    };
    /// A Route, always.
    pub const NO_TLS: Self = Self {
        reason: Cow::Borrowed("TLSNotEnabled"),
        message: Cow::Borrowed("external-domain-tls is not enabled"),
    };

    /// Both parts.
    pub fn new(
        reason: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { reason: reason.into(), message: message.into() }
    }
}

/// Whether a condition holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Truth {
    /// It holds; Knative gives some conditions a reason even then.
    True(Option<Why>),
    /// Not known yet; `None`: work goes on.
    Unknown(Option<Why>),
    /// It does not hold.
    False(Why),
}

/// Which condition. Each belongs to one kind of object; `*Ready` is that kind's `Ready`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// DomainMapping: `CertificateProvisioned`.
    DomainCertificate,
    /// DomainMapping: `DomainClaimed`.
    DomainClaimed,
    /// DomainMapping: `IngressReady`.
    DomainIngress,
    /// DomainMapping: `Ready`.
    DomainReady,
    /// DomainMapping: `ReferenceResolved`.
    DomainReference,
    /// Service: `ConfigurationsReady`.
    ServiceConfigurations,
    /// Service: `Ready`.
    ServiceReady,
    /// Service: `RoutesReady`.
    ServiceRoutes,
    /// Configuration: `Ready`.
    ConfigurationReady,
    /// Route: `AllTrafficAssigned`.
    RouteTraffic,
    /// Route: `CertificateProvisioned`.
    RouteCertificate,
    /// Route: `IngressReady`.
    RouteIngress,
    /// Route: `Ready`.
    RouteReady,
    /// Revision: `Active`, for information only.
    RevisionActive,
    /// Revision: `AutoscalingAnnotationsValid`, for information only; absent while none was ever refused.
    RevisionAnnotations,
    /// Revision: `ContainerHealthy`.
    RevisionHealthy,
    /// Revision: `Ready`.
    RevisionReady,
    /// Revision: `ResourcesAvailable`.
    RevisionResources,
}

/// Conditions with the moment each changed last, to the second, as objects show it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conditions(Vec<Held>);

/// A condition as it is kept, in 16 bytes: a text costs more only where there is an unusual one.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    why: Option<Arc<Why>>,
    /// Seconds since 1970.
    since: u32,
    kind: Kind,
    status: Status,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    True,
    Unknown,
    False,
}

/// What nearly every sleeping service says: kept once.
static COMMON: LazyLock<[Arc<Why>; 2]> =
    LazyLock::new(|| [Why::NO_TRAFFIC, Why::NO_TLS].map(Arc::new));

impl Held {
    fn new(kind: Kind, truth: Truth, now: Stamp) -> Self {
        let (status, why) = match truth {
            Truth::True(why) => (Status::True, why),
            Truth::Unknown(why) => (Status::Unknown, why),
            Truth::False(why) => (Status::False, Some(why)),
        };
        let share = |why: Why| {
            let common = COMMON.iter().find(|common| ***common == why);
            common.cloned().unwrap_or_else(|| Arc::new(why))
        };
        let since = u32::try_from(now.0 / 1000).unwrap_or(u32::MAX);
        Self { why: why.map(share), since, kind, status }
    }

    fn since(&self) -> Stamp {
        Stamp(u64::from(self.since) * 1000)
    }

    fn truth(&self) -> Truth {
        let why = self.why.as_deref().cloned();
        match self.status {
            Status::True => Truth::True(why),
            Status::Unknown => Truth::Unknown(why),
            Status::False => Truth::False(why.unwrap_or_else(|| Why::new("", ""))),
        }
    }
}

impl Conditions {
    /// Sets one. Its moment moves only if something changed.
    pub fn set(&mut self, kind: Kind, truth: Truth, now: Stamp) {
        let held = Held::new(kind, truth, now);
        match self.0.iter_mut().find(|have| have.kind == kind) {
            Some(have) if (have.status, &have.why) == (held.status, &held.why) => {}
            Some(slot) => *slot = held,
            None => {
                // A Revision has four, an app eight.
                if self.0.len().is_multiple_of(4) {
                    self.0.reserve_exact(4);
                }
                self.0.push(held);
            }
        }
    }

    /// One of them; unknown where it was never set.
    pub fn get(&self, kind: Kind) -> Truth {
        let found = self.0.iter().find(|have| have.kind == kind);
        found.map_or(Truth::Unknown(None), Held::truth)
    }

    /// Whether one was ever set.
    pub fn has(&self, kind: Kind) -> bool {
        self.0.iter().any(|have| have.kind == kind)
    }

    /// Whether one holds.
    pub fn is_true(&self, kind: Kind) -> bool {
        matches!(self.get(kind), Truth::True(_))
    }

    /// All, with the moment each changed last.
    pub fn iter(&self) -> impl Iterator<Item = (Kind, Stamp, Truth)> {
        self.0.iter().map(|held| (held.kind, held.since(), held.truth()))
    }

    /// `Ready` of an object from the conditions it depends on, by Knative's rule: all true, else the first
    /// false one, else the first unknown one. An unknown one that says why goes before those that do not: else `Deploying`
    /// would hide that a container listens where no client can reach it.
    pub fn ready(&self, on: &[Kind]) -> Truth {
        let all: Vec<Truth> = on.iter().map(|kind| self.get(*kind)).collect();
        let worst = all.iter().find(|truth| matches!(truth, Truth::False(_)));
        let says =
            |truth: &&Truth| matches!(truth, Truth::Unknown(Some(why)) if !why.message.is_empty());
        let worst = worst.or_else(|| all.iter().find(says));
        let worst = worst.or_else(|| all.iter().find(|truth| matches!(truth, Truth::Unknown(_))));
        worst.cloned().unwrap_or(Truth::True(None))
    }
}
