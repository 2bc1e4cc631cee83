//! Pure: what the rules depend on: the platform, the installation's settings, and who asks.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::{
    config_maps::{Defaults, Features},
    policy::AutoscalerConfig,
};

/// Where the pods will run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Platform {
    /// The local node: volumes are `emptyDir`, images may be folders, a name leaves room for its revisions'.
    Local,
    /// Kubernetes: Knative's rules and nothing else.
    #[default]
    Kubernetes,
}

/// Everything a rule may depend on.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// Where the pods will run.
    pub platform: Platform,
    /// `config-defaults`.
    pub defaults: &'a Defaults,
    /// `config-features`.
    pub features: &'a Features,
    /// `config-autoscaler`.
    pub autoscaler: &'a AutoscalerConfig,
    /// Domain of names inside the cluster, such as `cluster.local`.
    pub cluster_domain: &'a str,
}

/// The object around a template, whose name the template's own must begin with.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Parent<'a> {
    /// `metadata.name`; empty before a generated name is known.
    pub name: &'a str,
    /// `metadata.generateName`.
    pub generate_name: &'a str,
}

impl<'a> Parent<'a> {
    pub(super) fn of(meta: &'a ObjectMeta) -> Self {
        Self {
            name: meta.name.as_deref().unwrap_or_default(),
            generate_name: meta.generate_name.as_deref().unwrap_or_default(),
        }
    }
}
