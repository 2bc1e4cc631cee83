//! Pure: kinds and keys of the objects that users see on the local node. On Kubernetes some of them are rendered by the
//! same keys.

use std::fmt;

use common::wire::NamespacedName;

/// Kind of an object; on the local node its plural is the name of the object's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LocalObjectKind {
    /// A Knative Service, in `services`.
    Service,
    /// A Configuration, in the folder `configurations`.
    Configuration,
    /// A Revision, in the folder `revisions`.
    Revision,
    /// A Route, in the folder `routes`.
    Route,
    /// A pod, in the folder `pods`.
    Pod,
    /// A PodAutoscaler, in the folder `podautoscalers`.
    PodAutoscaler,
    /// A ServerlessService, in the folder `serverlessservices`.
    ServerlessService,
}

impl LocalObjectKind {
    /// All kinds of objects, in the order of declaration.
    pub const ALL: [Self; 7] = [
        Self::Service,
        Self::Configuration,
        Self::Revision,
        Self::Route,
        Self::Pod,
        Self::PodAutoscaler,
        Self::ServerlessService,
    ];

    /// Returns the lower-case plural, as in API paths.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Service => "services",
            Self::Configuration => "configurations",
            Self::Revision => "revisions",
            Self::Route => "routes",
            Self::Pod => "pods",
            Self::PodAutoscaler => "podautoscalers",
            Self::ServerlessService => "serverlessservices",
        }
    }
}

/// Kind and name of one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalObjectKey {
    /// Kind of the object, which on the local node is also its folder.
    pub kind: LocalObjectKind,
    /// Namespace and name of the object.
    pub name: NamespacedName,
}

impl LocalObjectKey {
    /// Returns the keys of an app's Service, Configuration and Route.
    pub fn of_app(name: &NamespacedName) -> [Self; 3] {
        [LocalObjectKind::Service, LocalObjectKind::Configuration, LocalObjectKind::Route]
            .map(|kind| Self { kind, name: name.clone() })
    }

    /// Returns the keys of a Revision, its PodAutoscaler and its ServerlessService, which share its name.
    pub fn of_revision(namespace: &str, name: &str) -> [Self; 3] {
        [
            LocalObjectKind::Revision,
            LocalObjectKind::PodAutoscaler,
            LocalObjectKind::ServerlessService,
        ]
        .map(|kind| Self { kind, name: NamespacedName::new(namespace, name) })
    }

    /// Returns the key of a pod.
    pub fn pod(namespace: &str, name: &str) -> Self {
        Self { kind: LocalObjectKind::Pod, name: NamespacedName::new(namespace, name) }
    }
}

impl fmt::Display for LocalObjectKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.kind.plural(), self.name)
    }
}
