//! Shell: objects as read from lists and watches: parsed once, without the fields that the controller ignores.

use std::{borrow::Cow, fmt, marker::PhantomData};

use kube::{
    Resource,
    api::{ApiResource, ObjectMeta},
    core::DynamicResourceScope,
};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Map, Value};

use super::watch_scope::{self, TrimmedParts};
use crate::model::object::ResourceKind as Kind;

/// An object of any kind. kube's `DynamicObject` is parsed twice and must be serialized to become a value again.
/// With a hundred thousand pods, that is most of the time of a start.
#[derive(Debug)]
pub(super) struct WatchedObject<S> {
    /// Name, namespace and version, the only metadata that kube's watcher reads.
    meta: ObjectMeta,
    /// The object without `managedFields` (often the larger half), with some parts
    /// [trimmed](watch_scope::trimmed_parts).
    pub(super) value: Value,
    shape: PhantomData<fn() -> S>,
}

// A derived `Clone` would require `S: Clone`.
impl<S> Clone for WatchedObject<S> {
    fn clone(&self) -> Self {
        Self { meta: self.meta.clone(), value: self.value.clone(), shape: PhantomData }
    }
}

/// Kind of the objects of a list, as a type: JSON of a list does not repeat the kind in each item.
pub(super) trait ObjectShape: fmt::Debug + 'static {
    /// Parts of the object of which only some fields are kept. All other parts are kept whole.
    const TRIMMED_PARTS: TrimmedParts;
}

/// Pods of Revisions, without their containers and volumes, which the controller does not read.
#[derive(Debug)]
pub(super) struct PodShape;

impl ObjectShape for PodShape {
    const TRIMMED_PARTS: TrimmedParts = watch_scope::trimmed_parts(Kind::Pod);
}

/// Deployments of Revisions, without their pod templates, which the controller does not read.
#[derive(Debug)]
pub(super) struct DeploymentShape;

impl ObjectShape for DeploymentShape {
    const TRIMMED_PARTS: TrimmedParts = watch_scope::trimmed_parts(Kind::Deployment);
}

/// Pods of users and of the system namespace, without their volumes.
#[derive(Debug)]
pub(super) struct UserPodShape;

impl ObjectShape for UserPodShape {
    const TRIMMED_PARTS: TrimmedParts = watch_scope::user_parts(Kind::Pod);
}

/// Deployments and StatefulSets of users. Of their pod templates only [`trim_object`](watch_scope::trim_object) removes
/// something.
#[derive(Debug)]
pub(super) struct UserWorkloadShape;

impl ObjectShape for UserWorkloadShape {
    const TRIMMED_PARTS: TrimmedParts = watch_scope::user_parts(Kind::Deployment);
}

/// HorizontalPodAutoscalers of users, without their metrics.
#[derive(Debug)]
pub(super) struct UserHpaShape;

impl ObjectShape for UserHpaShape {
    const TRIMMED_PARTS: TrimmedParts = watch_scope::user_parts(Kind::HorizontalPodAutoscaler);
}

/// Kinds of which the controller reads metadata and status, so that their specs are not kept.
#[derive(Debug)]
pub(super) struct WriteOnlyShape;

impl ObjectShape for WriteOnlyShape {
    const TRIMMED_PARTS: TrimmedParts = watch_scope::trimmed_parts(Kind::PodAutoscaler);
}

/// Kinds that are read whole. [`trim_object`](watch_scope::trim_object) removes the parts that are not kept.
#[derive(Debug)]
pub(super) struct FullShape;

impl ObjectShape for FullShape {
    const TRIMMED_PARTS: TrimmedParts = &[];
}

impl<'de, S: ObjectShape> Deserialize<'de> for WatchedObject<S> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = from.deserialize_map(FieldFilter::Object(S::TRIMMED_PARTS))?;
        let meta = &value["metadata"];
        if !meta.is_object() {
            return Err(D::Error::custom("an object without metadata"));
        }
        let word = |field: &str| meta[field].as_str().map(str::to_owned);
        // kube's watcher reads only these three fields; parsing a full `ObjectMeta` would be a second parse.
        let meta = ObjectMeta {
            name: word("name"),
            namespace: word("namespace"),
            resource_version: word("resourceVersion"),
            ..ObjectMeta::default()
        };
        Ok(Self { meta, value, shape: PhantomData })
    }
}

/// A deserializer that keeps some fields of an object and skips the others unparsed.
#[derive(Clone, Copy)]
enum FieldFilter {
    /// Fields of the object itself: all are kept, of some parts only the listed fields.
    Object(TrimmedParts),
    /// Fields of the metadata: all but `managedFields`.
    Metadata,
    /// Fields of a part: only the listed ones.
    Listed(&'static [&'static str]),
}

impl FieldFilter {
    /// Reads the value of the field `name`; `None` if the field is not kept.
    fn read_field<'de, A: MapAccess<'de>>(
        self,
        name: &str,
        all: &mut A,
    ) -> Result<Option<Value>, A::Error> {
        let part = match self {
            Self::Object(_) if name == "metadata" => Some(Self::Metadata),
            Self::Object(fields) => {
                let mut fields = fields.iter().filter(|(part, _)| *part == name);
                fields.next().map(|(_, fields)| Self::Listed(fields))
            }
            Self::Metadata if name == "managedFields" => {
                // `IgnoredAny` skips the value without building it; `managedFields` may be larger than the rest.
                return all.next_value::<IgnoredAny>().map(|_| None);
            }
            Self::Listed(fields) if !fields.contains(&name) => {
                return all.next_value::<IgnoredAny>().map(|_| None);
            }
            Self::Metadata | Self::Listed(_) => None,
        };
        match part {
            Some(part) => all.next_value_seed(part).map(Some),
            None => all.next_value().map(Some),
        }
    }
}

impl<'de> Visitor<'de> for FieldFilter {
    type Value = Value;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("fields")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        // `"spec": null` is legal JSON of an object, although a map is expected here.
        Ok(Value::Null)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = all.next_key::<String>()? {
            if let Some(value) = self.read_field(&name, &mut all)? {
                fields.insert(name, value);
            }
        }
        Ok(Value::Object(fields))
    }
}

impl<'de> DeserializeSeed<'de> for FieldFilter {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<S: 'static> Resource for WatchedObject<S> {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn group(kind: &ApiResource) -> Cow<'_, str> {
        kind.group.as_str().into()
    }

    fn version(kind: &ApiResource) -> Cow<'_, str> {
        kind.version.as_str().into()
    }

    fn kind(kind: &ApiResource) -> Cow<'_, str> {
        kind.kind.as_str().into()
    }

    fn api_version(kind: &ApiResource) -> Cow<'_, str> {
        kind.api_version.as_str().into()
    }

    fn plural(kind: &ApiResource) -> Cow<'_, str> {
        kind.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::ResourceExt as _;
    use serde_json::json;

    #[test]
    fn everything_but_managed_fields_is_read() {
        let object = json!({
            "kind": "Pod",
            "metadata": {
                "name": "a", "namespace": "b", "resourceVersion": "7", "managedFields": [{"manager": "x"}],
                "labels": {"metadata": "managedFields"},
            },
            "spec": {"metadata": {"managedFields": 1}},
        });
        let read: WatchedObject<FullShape> = serde_json::from_str(&object.to_string()).unwrap();
        let mut expected = object;
        expected["metadata"].as_object_mut().unwrap().remove("managedFields");
        assert_eq!(read.value, expected);
        assert_eq!(
            (read.name_any(), read.namespace(), read.resource_version()),
            ("a".into(), Some("b".into()), Some("7".into()))
        );
    }

    #[test]
    fn only_kept_fields_of_a_pod_are_read() {
        let object = json!({
            "metadata": {"name": "a", "managedFields": [1]},
            "spec": {"nodeName": "n", "containers": [{"spec": 1}]},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}], "qosClass": "Burstable"},
        });
        let read =
            serde_json::from_str::<WatchedObject<PodShape>>(&object.to_string()).unwrap().value;
        let expected = json!({
            "metadata": {"name": "a"}, "spec": {"nodeName": "n"},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}]},
        });
        assert_eq!(read, expected);
        let bare = r#"{"metadata": {}, "spec": null}"#;
        let read = serde_json::from_str::<WatchedObject<DeploymentShape>>(bare).unwrap().value;
        assert_eq!(read, json!({"metadata": {}, "spec": null}));
    }

    /// Each kind is parsed by a type, and a response is trimmed by the object's label: both must agree.
    #[test]
    fn an_object_of_a_user_is_read_as_it_is_trimmed() {
        let object = json!({
            "metadata": {"name": "a"},
            "spec": {
                "replicas": 1, "nodeName": "n", "template": {"spec": {"containers": []}},
                "containers": [], "volumes": [], "scaleTargetRef": {}, "metrics": [],
            },
            "status": {"phase": "Running", "readyReplicas": 1, "currentMetrics": []},
        });
        fn read<S: ObjectShape>(text: &str) -> Value {
            serde_json::from_str::<WatchedObject<S>>(text).unwrap().value
        }
        let text = object.to_string();
        for (kind, read) in [
            (Kind::Pod, read::<UserPodShape>(&text)),
            (Kind::Deployment, read::<UserWorkloadShape>(&text)),
            (Kind::StatefulSet, read::<UserWorkloadShape>(&text)),
            (Kind::HorizontalPodAutoscaler, read::<UserHpaShape>(&text)),
        ] {
            let mut trimmed = object.clone();
            watch_scope::prune_fields(kind, &mut trimmed);
            assert_eq!(read, trimmed, "{kind}");
        }
    }

    #[test]
    fn a_value_without_metadata_is_refused() {
        for text in ["1", "[]", "{}", "null", r#"{"metadata": []}"#, r#"{"metadata": null}"#] {
            assert!(serde_json::from_str::<WatchedObject<FullShape>>(text).is_err(), "{text}");
        }
    }
}
