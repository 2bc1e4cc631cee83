//! Pure: the components of Rouse.

use std::fmt;

use crate::wire::ClientComponent;

/// Component of Rouse. It runs in a process of its own, or as threads of `rouse up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// Signs certificates, serves routes, and receives pod reports and scale decisions.
    Controller,
    /// Writes the eBPF maps of its node and reports its pods.
    Agent,
    /// Forwards requests, and reports its wait queues.
    Activator,
    /// Decides scale, and receives usage reports.
    Autoscaler,
}

impl Component {
    const ALL: [Self; 4] = [Self::Controller, Self::Agent, Self::Activator, Self::Autoscaler];

    /// Name of the component. It is also the name of its crate, the suffix of `loglevel.<name>`, and the role in a
    /// certificate.
    pub fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Agent => "agent",
            Self::Activator => "activator",
            Self::Autoscaler => "autoscaler",
        }
    }

    /// Returns the component with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }
}

impl From<ClientComponent> for Component {
    fn from(component: ClientComponent) -> Self {
        match component {
            ClientComponent::Agent => Self::Agent,
            ClientComponent::Activator => Self::Activator,
            ClientComponent::Autoscaler => Self::Autoscaler,
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}
