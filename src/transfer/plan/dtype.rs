//! The data types of arrays, with their names and sizes. Elements are never converted.
//!
//! Begin at [`Dtype`].

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! dtypes {
    ($($name:ident $text:literal $bits:literal,)*) => {
        /// A data type of an array's elements, by JAX's name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "&'static str")]
        pub enum Dtype { $(#[doc = concat!("`", $text, "`")] $name,)* }

        impl Dtype {
            /// All data types.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Returns JAX's name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Returns the size of an element in bits.
            #[must_use]
            pub const fn bits(self) -> u32 {
                match self { $(Self::$name => $bits,)* }
            }
        }
    };
}

dtypes! {
    Bool "bool" 8,
    Int2 "int2" 2,
    Int4 "int4" 4,
    Int8 "int8" 8,
    Int16 "int16" 16,
    Int32 "int32" 32,
    Int64 "int64" 64,
    Uint2 "uint2" 2,
    Uint4 "uint4" 4,
    Uint8 "uint8" 8,
    Uint16 "uint16" 16,
    Uint32 "uint32" 32,
    Uint64 "uint64" 64,
    Float4E2m1fn "float4_e2m1fn" 4,
    Float6E2m3fn "float6_e2m3fn" 6,
    Float6E3m2fn "float6_e3m2fn" 6,
    Float8E3m4 "float8_e3m4" 8,
    Float8E4m3 "float8_e4m3" 8,
    Float8E4m3b11fnuz "float8_e4m3b11fnuz" 8,
    Float8E4m3fn "float8_e4m3fn" 8,
    Float8E4m3fnuz "float8_e4m3fnuz" 8,
    Float8E5m2 "float8_e5m2" 8,
    Float8E5m2fnuz "float8_e5m2fnuz" 8,
    Float8E8m0fnu "float8_e8m0fnu" 8,
    Float16 "float16" 16,
    Bfloat16 "bfloat16" 16,
    Float32 "float32" 32,
    Float64 "float64" 64,
    Complex64 "complex64" 64,
    Complex128 "complex128" 128,
}

impl Dtype {}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<Dtype> for &'static str {
    fn from(dtype: Dtype) -> Self {
        dtype.name()
    }
}
