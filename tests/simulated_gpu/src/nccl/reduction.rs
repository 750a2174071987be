//! Sums, products, minima, maxima and averages.

use std::ffi::c_int;

/// An operation of `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Reduction {
    /// Returns the operation of a number.
    pub fn of(number: c_int) -> Option<Self> {
        let all = [Self::Sum, Self::Product, Self::Max, Self::Min, Self::Average];
        usize::try_from(number).ok().and_then(|number| all.get(number).copied())
    }
}

/// Returns whether elements of a type of `ncclDataType_t` can be reduced here.
pub fn is_reducible(datatype: c_int) -> bool {
    matches!(datatype, 0..=5 | 7 | 8)
}

/// An element of a reduction.
trait Element: Copy + PartialOrd {
    const SIZE: usize;
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn divide(self, by: usize) -> Self;
}

/// Implements elements: the type, its sum, its product.
macro_rules! elements {
    ($($element:ty: $add:expr, $multiply:expr;)*) => {
        $(impl Element for $element {
            const SIZE: usize = size_of::<$element>();

            fn read(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<$element>()];
                own.copy_from_slice(bytes);
                Self::from_ne_bytes(own)
            }

            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }

            fn add(self, other: Self) -> Self {
                $add(self, other)
            }

            fn multiply(self, other: Self) -> Self {
                $multiply(self, other)
            }

            fn divide(self, by: usize) -> Self {
                self / by as $element
            }
        })*
    };
}

elements! {
    i8: i8::wrapping_add, i8::wrapping_mul;
    u8: u8::wrapping_add, u8::wrapping_mul;
    i32: i32::wrapping_add, i32::wrapping_mul;
    u32: u32::wrapping_add, u32::wrapping_mul;
    i64: i64::wrapping_add, i64::wrapping_mul;
    u64: u64::wrapping_add, u64::wrapping_mul;
    f32: std::ops::Add::add, std::ops::Mul::mul;
    f64: std::ops::Add::add, std::ops::Mul::mul;
}

fn reduce_elements<E: Element>(reduction: Reduction, parts: &[Vec<u8>]) -> Vec<u8> {
    let mut result = parts[0].clone();
    for (index, place) in result.chunks_exact_mut(E::SIZE).enumerate() {
        let elements = parts.iter().map(|part| E::read(&part[index * E::SIZE..][..E::SIZE]));
        let reduced = elements.reduce(|one, other| match reduction {
            Reduction::Sum | Reduction::Average => one.add(other),
            Reduction::Product => one.multiply(other),
            Reduction::Max => {
                if other > one {
                    other
                } else {
                    one
                }
            }
            Reduction::Min => {
                if other < one {
                    other
                } else {
                    one
                }
            }
        });
        if let Some(reduced) = reduced {
            let reduced = if reduction == Reduction::Average { reduced.divide(parts.len()) } else { reduced };
            reduced.write(place);
        }
    }
    result
}

/// Reduces the contents of all ranks, in their order. They have equal lengths.
pub fn reduce(reduction: Reduction, datatype: u32, parts: &[Vec<u8>]) -> Vec<u8> {
    match datatype {
        0 => reduce_elements::<i8>(reduction, parts),
        1 => reduce_elements::<u8>(reduction, parts),
        2 => reduce_elements::<i32>(reduction, parts),
        3 => reduce_elements::<u32>(reduction, parts),
        4 => reduce_elements::<i64>(reduction, parts),
        5 => reduce_elements::<u64>(reduction, parts),
        7 => reduce_elements::<f32>(reduction, parts),
        _ => reduce_elements::<f64>(reduction, parts),
    }
}
