//! Pure: inputs of the rules beside the object: the platform, the installation's settings, a template's parent.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::model::{
    cluster_state::PlatformKind,
    config_maps::{Features, RevisionDefaults},
    scale_policy::ScalePolicyConfig,
};

/// Platform and settings that a rule may depend on.
#[derive(Clone, Copy, Debug)]
pub struct RuleSettings<'a> {
    /// Platform on which the pods will run. On the local node volumes are `emptyDir`, images may be folders, and a
    /// Revision's suffix must fit after a name.
    pub platform: PlatformKind,
    /// Checked settings of `config-defaults`.
    pub defaults: &'a RevisionDefaults,
    /// Checked settings of `config-features`.
    pub features: &'a Features,
    /// Checked settings of `config-autoscaler`.
    pub autoscaler: &'a ScalePolicyConfig,
    /// Domain of cluster-local names, such as `cluster.local`.
    pub cluster_domain: &'a str,
    /// True if `config-network` trusts an ingress, so that a class of another ingress has an effect.
    pub trusts_ingresses: bool,
}

/// Object around a template, whose name the Revision's own name must begin with.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TemplateParent<'a> {
    /// Value of `metadata.name`; empty before a generated name is known.
    pub name: &'a str,
    /// Value of `metadata.generateName`, or empty text.
    pub generate_name: &'a str,
}

impl<'a> TemplateParent<'a> {
    pub(super) fn from_metadata(meta: &'a ObjectMeta) -> Self {
        Self {
            name: meta.name.as_deref().unwrap_or_default(),
            generate_name: meta.generate_name.as_deref().unwrap_or_default(),
        }
    }
}
