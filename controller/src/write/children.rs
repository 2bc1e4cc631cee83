//! Pure: the child objects of a Revision and a Route, each complete, from plain inputs.
//!
//! A Service with one Revision and one container costs fifteen objects: Service, Configuration, Route, Revision,
//! Deployment and its ReplicaSet, PodAutoscaler, ServerlessService, Image, and three Kubernetes Services with an
//! EndpointSlice each. The Services are `<revision>-private`, whose slice Kubernetes makes, and `<revision>` and
//! `<route>` with slices of Rouse. Where addresses have two families it is seventeen, since both need a second slice.
//! There is no Metric: only Knative's own autoscaler, which scrapes by it, reads one.

use std::collections::BTreeMap;

use common::wire::AppProtocol;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::Serialize;
use serde_json::{Value, json};

use crate::model::{
    knative::{RevisionSpec, user_container},
    object::ResourceKind,
};

pub mod deployment;
pub mod hpa;
pub mod images;
pub mod meta;
pub mod pod;
pub mod scaling;
pub mod services;
pub mod slices;
pub mod subset;

/// A complete object, ready to be applied.
#[derive(Clone, Debug, PartialEq)]
pub struct ChildObject {
    /// Kind of the object, with its API group.
    pub resource: ResourceKind,
    /// Namespace of the object; empty for a cluster-scoped one.
    pub namespace: String,
    /// Name of the object, without its namespace.
    pub name: String,
    /// The object as JSON: `apiVersion`, `kind`, `metadata`, and the rest.
    pub body: Value,
}

impl ChildObject {
    /// Builds an object from its metadata and the other top-level fields.
    pub(crate) fn new(resource: ResourceKind, meta: ObjectMeta, rest: impl Serialize) -> Self {
        let (namespace, name) = (meta.namespace.clone(), meta.name.clone());
        let mut body = to_json_value(rest);
        if let Value::Object(fields) = &mut body {
            fields.insert("apiVersion".into(), json!(resource.api_version()));
            fields.insert("kind".into(), json!(resource.kind()));
            fields.insert("metadata".into(), to_json_value(meta));
        }
        let namespace = namespace.unwrap_or_default();
        Self { resource, namespace, name: name.unwrap_or_default(), body }
    }
}

fn to_json_value(value: impl Serialize) -> Value {
    // Types of an API always serialize; the API server would refuse `null`.
    serde_json::to_value(value).unwrap_or_default()
}

/// The object that controls another one, for its owner reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerObject<'a> {
    /// Kind of the owner, with its API group.
    pub resource: ResourceKind,
    /// Name of the owner, which is in the same namespace.
    pub name: &'a str,
    /// UID of the owner, as the API server gave it.
    pub uid: &'a str,
}

impl OwnerObject<'_> {
    /// Owner reference that makes this object the controller of another one.
    pub fn to_owner_reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: self.resource.api_version(),
            kind: self.resource.kind().into(),
            name: self.name.into(),
            uid: self.uid.into(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }
    }

    /// Owner reference to an object of a user: nothing keeps its deletion waiting.
    pub fn to_weak_owner_reference(&self) -> OwnerReference {
        OwnerReference { block_owner_deletion: Some(false), ..self.to_owner_reference() }
    }
}

/// A Revision, as far as its child objects depend on it.
#[derive(Clone, Copy, Debug)]
pub struct RevisionView<'a> {
    /// Namespace of the Revision and of all its children.
    pub namespace: &'a str,
    /// Name of the Revision, without its namespace.
    pub name: &'a str,
    /// UID of the Revision, as the API server gave it.
    pub uid: &'a str,
    /// Name of the Service that the Revision came from; empty without one.
    pub service: &'a str,
    /// Name of the Configuration that the Revision came from.
    pub configuration: &'a str,
    /// Labels of the Revision object.
    pub labels: &'a BTreeMap<String, String>,
    /// Annotations of the Revision object.
    pub annotations: &'a BTreeMap<String, String>,
    /// The Revision's spec, with every default filled in.
    pub spec: &'a RevisionSpec,
    /// Pairs of container name and image with digest; a container that is not listed keeps its tag.
    pub digests: &'a [(Box<str>, Box<str>)],
}

impl<'a> RevisionView<'a> {
    /// The Revision as the owner of its children.
    pub fn owner(&self) -> OwnerObject<'a> {
        OwnerObject { resource: ResourceKind::Revision, name: self.name, uid: self.uid }
    }

    /// Returns the protocol that its pods speak.
    pub fn protocol(&self) -> AppProtocol {
        user_container::read_protocol(self.annotations, &self.spec.pod.containers)
    }

    /// Image with digest of a container, once it is resolved.
    fn resolved_image(&self, container: &str) -> Option<&str> {
        let digest = self.digests.iter().find(|(name, _)| **name == *container);
        // For a skipped registry the entry holds a tag or nothing; the spec's own image is used then.
        digest.map(|(_, image)| &**image).filter(|image| image.contains('@'))
    }
}

#[cfg(test)]
mod tests;
