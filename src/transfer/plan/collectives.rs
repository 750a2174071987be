//! The usual collectives by name. Each is defined by a source sharding and a destination sharding.
//!
//! The collectives have no rules of their own: `region_routing.rs` has the rules of all plans. Begin at [`Reshard`].

use super::{
    ArrayDescription, Axis, DeviceId, Dtype, Mesh, Partition, PartitionSpec, Placement, Plan, PlanError,
    PlanOptions, Sharding,
};

/// A broadcast: copies one device's array to several devices.
#[derive(Debug, Clone)]
pub struct Broadcast {
    /// The shape of the array.
    pub shape: Vec<u64>,
    /// The data type of its elements.
    pub dtype: Dtype,
    /// The device that has the array.
    pub from: DeviceId,
    /// The devices that are to have it, in any order. The sender may be among them.
    pub to: Vec<DeviceId>,
    /// The tasks and hosts of the devices.
    pub placement: Placement,
    /// The options of the plan.
    pub options: PlanOptions,
}

/// An all-gather: makes a sharded array whole on the devices that hold its parts.
#[derive(Debug, Clone)]
pub struct AllGather {
    /// The array.
    pub array: ArrayDescription,
    /// The axes of its mesh along which the parts are gathered; `None` for all.
    pub axes: Option<Vec<String>>,
    /// The tasks and hosts of the devices.
    pub placement: Placement,
    /// The options of the plan.
    pub options: PlanOptions,
}

/// A scatter: sends the parts of one device's array to several devices.
#[derive(Debug, Clone)]
pub struct Scatter {
    /// The shape of the array.
    pub shape: Vec<u64>,
    /// The data type of its elements.
    pub dtype: Dtype,
    /// The device that has the array.
    pub from: DeviceId,
    /// The sharding by which each device is to have a part.
    pub to: Sharding,
    /// The tasks and hosts of the devices.
    pub placement: Placement,
    /// The options of the plan.
    pub options: PlanOptions,
}

/// A reshard: changes any sharding into any other, on the same devices or on others.
#[derive(Debug, Clone)]
pub struct Reshard {
    /// The array as it is.
    pub source: ArrayDescription,
    /// The array as it is to become.
    pub destination: ArrayDescription,
    /// The tasks and hosts of the devices.
    pub placement: Placement,
    /// The options of the plan.
    pub options: PlanOptions,
}

impl Plan {
    /// Plans a broadcast.
    ///
    /// # Errors
    /// Returns the errors of [`Plan::new`].
    pub fn broadcast(ask: Broadcast) -> Result<Self, PlanError> {
        let source = array_whole_on_each_device(ask.shape.clone(), ask.dtype, vec![ask.from]);
        Self::new(
            source,
            array_whole_on_each_device(ask.shape, ask.dtype, ask.to),
            &ask.placement,
            ask.options,
        )
    }

    /// Plans an all-gather: afterwards no dimension is divided along the requested axes.
    ///
    /// # Errors
    /// Returns the errors of [`Plan::new`], and [`PlanError::UnknownAxis`] if a requested axis is not in the
    /// mesh.
    pub fn all_gather(ask: AllGather) -> Result<Self, PlanError> {
        // The check bounds the names in length and number.
        ask.array.check()?;
        let mut destination = ask.array.clone();
        if let Some(axes) = &ask.axes {
            let names = || destination.sharding.mesh.axes.iter().map(|axis| &axis.name);
            if let Some(unknown) = axes.iter().find(|axis| !names().any(|name| name == *axis)) {
                return Err(PlanError::UnknownAxis(unknown.chars().take(super::MAX_NAME / 4).collect()));
            }
        }
        for entry in &mut destination.sharding.spec.0 {
            let stays = |axis: &&String| ask.axes.as_ref().is_some_and(|gathered| !gathered.contains(axis));
            *entry = Partition::Axes(entry.axes().iter().filter(stays).cloned().collect());
        }
        Self::new(ask.array, destination, &ask.placement, ask.options)
    }

    /// Plans a scatter.
    ///
    /// # Errors
    /// Returns the errors of [`Plan::new`].
    pub fn scatter(ask: Scatter) -> Result<Self, PlanError> {
        let source = array_whole_on_each_device(ask.shape.clone(), ask.dtype, vec![ask.from]);
        let destination = ArrayDescription { shape: ask.shape, dtype: ask.dtype, sharding: ask.to };
        Self::new(source, destination, &ask.placement, ask.options)
    }

    /// Plans a change of sharding.
    ///
    /// # Errors
    /// Returns the errors of [`Plan::new`].
    pub fn reshard(ask: Reshard) -> Result<Self, PlanError> {
        Self::new(ask.source, ask.destination, &ask.placement, ask.options)
    }
}

/// Returns the description of an array that is whole on each of these devices.
fn array_whole_on_each_device(shape: Vec<u64>, dtype: Dtype, devices: Vec<DeviceId>) -> ArrayDescription {
    let axes = vec![Axis { name: "device".to_owned(), size: devices.len() as u64 }];
    ArrayDescription {
        shape,
        dtype,
        sharding: Sharding { mesh: Mesh { axes, devices }, spec: PartitionSpec::default() },
    }
}
