/* What a compiled part would add: a callable in front of another one, that puts torch's current stream in its place.

   bind(function, place, current, slow): called with a handle of the current stream, with None, with 0 to 2, or with the
   argument left out, it calls `function` with the current stream; with anything else, `slow`. It knows one device. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *function, *current, *slow, *device;
    Py_ssize_t place;
    vectorcallfunc call;
} Bound;

static PyObject *call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
    Bound *self = (Bound *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *given = count > self->place ? args[self->place] : Py_None;
    if (names != NULL || count < self->place || count > self->place + 1 || count > 15 ||
        !(given == Py_None || PyLong_CheckExact(given)))
        return PyObject_Vectorcall(self->slow, args, flags, names);
    PyObject *current = PyObject_Vectorcall(self->current, &self->device, 1, NULL);
    if (current == NULL) return NULL;
    unsigned long long handle = PyLong_AsUnsignedLongLong(current);
    unsigned long long wanted = given == Py_None ? 0 : PyLong_AsUnsignedLongLong(given);
    PyObject *result;
    if (PyErr_Occurred()) {
        PyErr_Clear();
        result = PyObject_Vectorcall(self->slow, args, flags, NULL);
    } else if (wanted == handle && given != Py_None) {
        result = PyObject_Vectorcall(self->function, args, flags, NULL);
    } else if (wanted > 2) {
        result = PyObject_Vectorcall(self->slow, args, flags, NULL);
    } else {
        PyObject *filled[16];
        for (Py_ssize_t i = 0; i < self->place; ++i) filled[i] = args[i];
        filled[self->place] = current;
        result = PyObject_Vectorcall(self->function, filled, self->place + 1, NULL);
    }
    Py_DECREF(current);
    return result;
}

static void dealloc(PyObject *object) {
    Bound *self = (Bound *)object;
    Py_XDECREF(self->function);
    Py_XDECREF(self->current);
    Py_XDECREF(self->slow);
    Py_XDECREF(self->device);
    Py_TYPE(object)->tp_free(object);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Bound, call), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyTypeObject Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "streamshim_compiled.Bound",
    .tp_basicsize = sizeof(Bound),
    .tp_dealloc = dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Bound, call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_members = members,
};

static PyObject *bind(PyObject *module, PyObject *args) {
    PyObject *function, *current, *slow;
    Py_ssize_t place;
    if (!PyArg_ParseTuple(args, "OnOO", &function, &place, &current, &slow)) return NULL;
    Bound *self = PyObject_New(Bound, &Type);
    if (self == NULL) return NULL;
    self->function = Py_NewRef(function);
    self->current = Py_NewRef(current);
    self->slow = Py_NewRef(slow);
    self->device = PyLong_FromLong(0);
    self->place = place;
    self->call = call;
    return (PyObject *)self;
}

static PyMethodDef methods[] = {{"bind", bind, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "streamshim_compiled", NULL, -1, methods};

PyMODINIT_FUNC PyInit_streamshim_compiled(void) {
    return PyType_Ready(&Type) < 0 ? NULL : PyModule_Create(&definition);
}
