// The version of all structures and calls: quire/kernels/native_library.py asks, so that an old build is not called in a new way.
extern "C" int quire_version() { return 14; }
